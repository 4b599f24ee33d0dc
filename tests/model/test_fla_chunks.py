"""Prompts by flash-linear-attention: a fake of it gets the right inputs and writes the right states.

The C kernels are the reference. cuda_fla_cases.py tests the Triton path around it, and the library itself on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.model.inputs.state_rows import NO_BLOCK, Segment, segments_of
from pd_cluster.model.kernels.cuda.states.chunk_passes import LEAST_ROWS, MOST_RUNS, ChunkPass, divided
from pd_cluster.native import state_kernels
from pd_cluster.native.recurrence_values import GatedNorm
from tests.support import fake_fla
from tests.support.recurrences import (
    BlocksOfStates,
    RecurrentCase,
    convolve,
    delta_case,
    kernel_of,
    mamba_case,
    table_of,
)

CASES: dict[str, Callable[[int], RecurrentCase]] = {
    "delta": lambda n: delta_case(4, 2, (16, 24), n),
    "delta, one key head": lambda n: delta_case(3, 1, (20, 12), n),
    "by channel": lambda n: delta_case(2, 2, (24, 16), n, by_channel=True),
    "mamba": lambda n: mamba_case(4, 2, (12, 20), n),
    "mamba, clamped": lambda n: mamba_case(6, 3, (5, 16), n, "silu after", (0.5, 1.5)),
}


@pytest.fixture
def chunks() -> Iterator[ModuleType]:
    with fake_fla.installed():
        yield importlib.import_module("pd_cluster.model.kernels.cuda.states.fla_chunks")


# Sequences of 1, 70, 64, 63 and 150 rows; two of them are kept, one of these twice.
SEGMENTS = (
    *((0, 1, 2, -1), (1, 40, 0, 7), (40, 71, 0, -1), (71, 135, 3, -1), (135, 198, 4, -1)),
    *((198, 262, 5, 8), (262, 300, 5, 9), (300, 348, 5, -1)),
)


@pytest.mark.skipif(not state_kernels.can_run(), reason="no C kernels here")
@pytest.mark.parametrize("name", CASES)
def test_rows_and_states_are_those_of_single_tokens(chunks: Any, name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name](SEGMENTS[-1][1])
    assert case.recurrence is not None
    recurrence = replace(case.recurrence, norm=GatedNorm())  # so that the C kernels return the norm's input
    case = replace(case, recurrence=recurrence)
    pool, expected_pool = BlocksOfStates(case, 10), BlocksOfStates(case, 10)
    pool.data[:6] = expected_pool.data[:6] = 0
    pool.planes[0][:6] = expected_pool.planes[0][:6] = torch.randn(6, pool.planes[0].shape[1])
    expected = kernel_of(case)(case.inputs, expected_pool.planes, table_of(*SEGMENTS))
    short, passes = divided(table_of(*SEGMENTS))
    assert short.tolist() == [list(SEGMENTS[0]), list(SEGMENTS[4])]
    convolved = torch.cat([convolve(case.convolution, case.inputs.convolved[own]) for own in sequences()])
    out = torch.full_like(expected, torch.nan)
    given = [ChunkPass.of(runs, CPU) for runs in passes]
    chunks.FlaChunks(recurrence)(case.inputs, convolved, pool.planes[0], given, out)
    for own, is_long in zip(sequences(), (False, True, True, False, True), strict=True):
        if is_long:
            torch.testing.assert_close(out[own], expected[own], rtol=2e-5, atol=2e-5)
        else:
            assert out[own].isnan().all()
    written = [0, 3, 5, 7, 8, 9]
    torch.testing.assert_close(pool.planes[0][written], expected_pool.planes[0][written], rtol=2e-5, atol=2e-5)
    assert not torch.equal(pool.planes[0][2], expected_pool.planes[0][2])
    assert pool.planes[0][6].isnan().all()


def sequences() -> list[slice]:
    return [slice(0, 1), slice(1, 71), slice(71, 135), slice(135, 198), slice(198, 348)]


def test_a_step_is_divided_into_runs_that_follow_each_other() -> None:
    """In random steps, each row is computed once, after its sequence's earlier rows; states are kept as planned."""
    rng = random.Random(1)
    for _ in range(200):
        lens = [rng.choice([1, 1, 2, 63, 64, 65, 200, 1000]) for _ in range(rng.randint(1, 50))]
        keeps = []
        for seq, length in enumerate(lens):
            ends = sorted(rng.sample(range(1, length + 1), min(length, rng.choice([0, 0, 1, 3]))))
            keeps += [(seq, end, 100 + len(keeps) + at) for at, end in enumerate(ends)]
        blocks = rng.sample(range(100), len(lens))
        segments = list(segments_of(lens, blocks, keeps))
        short, passes = divided(np.array(segments, dtype=np.int32))
        own = [Segment(*each) for each in short.tolist()]
        assert own == [each for each in segments if lens[blocks.index(each.block)] < LEAST_ROWS]
        done = {block: sum(lens[:seq]) for seq, block in enumerate(blocks)}
        kept = dict[int, tuple[int, int]]()
        for runs in (own, *passes):
            assert runs is own or len({run.block for run in runs}) == len(runs) <= MOST_RUNS
            for run in runs:
                assert run.first == done[run.block]
                done[run.block] = run.stop
                if run.keep != NO_BLOCK:
                    kept[run.keep] = run.block, run.stop
        assert done == {block: sum(lens[: seq + 1]) for seq, block in enumerate(blocks)}
        assert kept == {each.keep: (each.block, each.stop) for each in segments if each.keep != NO_BLOCK}
        most = max([sum(seq == at for seq, *_ in keeps) for at in range(len(lens))])
        assert len(passes) <= (most + 1) * (1 + len(lens) // MOST_RUNS)


def test_rows_that_are_apart_are_gathered() -> None:
    runs = [Segment(3, 70, 5), Segment(80, 150, 1, 9)]
    found = ChunkPass.of(runs, CPU)
    assert isinstance(found.rows, torch.Tensor)
    assert found.rows.tolist() == [*range(3, 70), *range(80, 150)]
    assert found.cu_seqlens.tolist() == found.host_cu_seqlens.tolist() == [0, 67, 137]
    assert (found.blocks.tolist(), found.kept.tolist(), found.keeps.tolist()) == ([5, 1], [1], [9])
    assert ChunkPass.of([Segment(3, 70, 5), Segment(70, 150, 1)], CPU).rows == slice(3, 150)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
def test_the_fake_has_its_signatures() -> None:
    for folder, fake in fake_fla.FUNCTIONS.items():
        real = getattr(importlib.import_module(f"fla.ops.{folder}"), fake.__name__)
        theirs = inspect.signature(real).parameters
        for name, own in inspect.signature(fake).parameters.items():
            assert theirs[name].default == own.default, (folder, name)
        order = [name for name in theirs if name in inspect.signature(fake).parameters]
        assert order == list(inspect.signature(fake).parameters), folder
