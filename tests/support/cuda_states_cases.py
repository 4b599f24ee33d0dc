"""Recurrent layers in Triton, interpreted or on a GPU: against float64 and the C kernels, and bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pd_cluster.devices.device import CPU, resolve
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.state_rows import NO_BLOCK, Segment, StateRows
from pd_cluster.model.kernels.cuda.states.triton_states import TritonStates
from tests.support.interpreted import SLOW_IF_INTERPRETED, choose_device
from tests.support.recurrences import (
    BlocksOfStates,
    RecurrentCase,
    conv_case,
    delta_case,
    kernel_of,
    mamba_case,
    reference,
    table_of,
)

choose_device()

IS_HOST = torch.get_default_device().type == "cpu"
ON_DEVICE = cast(KVPool, SimpleNamespace(device=CPU if IS_HOST else resolve("cuda")))
CLAMPED = (0.5, 1.5)
FEW: dict[str, Callable[[int], RecurrentCase]] = {
    "delta": lambda n: delta_case(2, 1, (16, 24), n),
    "by channel": lambda n: delta_case(1, 1, (20, 37), n, by_channel=True, kernel=2),
    "mamba": lambda n: mamba_case(2, 1, (5, 20), n),
    "convolution": lambda n: conv_case(320, n),
}
MORE: dict[str, Callable[[int], RecurrentCase]] = {
    "delta of qwen3_next": lambda n: delta_case(4, 2, (128, 128), n),
    "delta of olmo": lambda n: delta_case(3, 3, (96, 192), n),
    "delta of long keys": lambda n: delta_case(2, 2, (256, 40), n, kernel=3),
    "by channel, wide": lambda n: delta_case(4, 4, (128, 128), n, by_channel=True),
    "mamba of granite": lambda n: mamba_case(8, 1, (64, 128), n),
    "mamba, clamped": lambda n: mamba_case(6, 3, (5, 20), n, "silu after", CLAMPED, kernel=8),
    "mamba of falcon": lambda n: mamba_case(4, 2, (32, 256), n),
    "convolution of 4": lambda n: conv_case(1024, n, kernel=4),
}
ALL = FEW | MORE
NAMES = [*FEW, *(pytest.param(name, marks=SLOW_IF_INTERPRETED) for name in MORE)]


def a_case(name: str, num_rows: int) -> RecurrentCase:
    torch.manual_seed(num_rows)
    return ALL[name](num_rows)


def compute(case: RecurrentCase, pool: BlocksOfStates, *segments: tuple[int, int, int, int]) -> torch.Tensor:
    layer = TritonStates(case.convolution, case.recurrence)
    return layer(case.inputs, pool.planes, StateRows.of(ON_DEVICE, (Segment(*each) for each in segments)))


def close(found: torch.Tensor, expected: torch.Tensor, limit: float = 2e-6) -> None:
    assert (found - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW_IF_INTERPRETED) for name in ALL])
def test_numbers(name: str) -> None:
    case = a_case(name, 20)
    pool = BlocksOfStates(case, 1)
    pool.data[:] = 0
    close(compute(case, pool, (0, 20, 0, NO_BLOCK)), reference(case))


@pytest.mark.skipif(not IS_HOST, reason="the kernels in C are for CPUs")
@pytest.mark.parametrize("name", NAMES)
def test_steps_and_states_are_those_of_the_kernels_in_c(name: str) -> None:
    """Computes sequences of one, many and two tokens with states; the second sequence's state is kept twice.

    No other block changes.
    """
    case, segments = a_case(name, 14), [(0, 1, 2, -1), (1, 3, 0, 5), (3, 8, 0, 6), (8, 12, 0, -1), (12, 14, 1, 7)]
    pool, of_c = BlocksOfStates(case, 8), BlocksOfStates(case, 8)
    pool.data[:3] = of_c.data[:3] = torch.randn(3, pool.data.shape[1])
    found = compute(case, pool, *segments)
    close(found, kernel_of(case)(case.inputs, of_c.planes, table_of(*segments)))
    for plane, own in zip(pool.planes, of_c.planes, strict=True):
        assert plane[3:5].isnan().all()
        close(plane[[0, 1, 2, 5, 6, 7]], own[[0, 1, 2, 5, 6, 7]])


def sizes(kind: str) -> Iterator[int]:
    """Yields the lengths of a prompt's pieces."""
    rng = random.Random(kind)
    while True:
        yield rng.choice([1, 2, 3, 5, 9, 17]) if kind == "random" else int(kind)


def cut(num_rows: int, kind: str) -> list[tuple[int, int]]:
    found, at, lengths = [], 0, sizes(kind)
    while at < num_rows:
        found.append((at, min(num_rows, at + next(lengths))))
        at = found[-1][1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1", "63", "64", "65", "random"])
@pytest.mark.parametrize("name", FEW)
def test_bits_depend_on_no_cut_anywhere(name: str, kind: str) -> None:
    check_cut(a_case(name, 130), kind)


@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_bits_depend_on_no_cut(name: str) -> None:
    check_cut(a_case(name, 10), "random")


def check_cut(case: RecurrentCase, kind: str) -> None:
    whole, pieces = BlocksOfStates(case, 3), BlocksOfStates(case, 3)
    whole.data[1] = pieces.data[0] = 0
    num_rows = len(case.inputs.convolved)
    expected = compute(case, whole, (0, num_rows, 1, NO_BLOCK))
    parts = cut(num_rows, kind)
    found = [compute(case.rows(slice(*part)), pieces, (0, part[1] - part[0], 0, NO_BLOCK)) for part in parts]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(pieces.data[0], whole.data[1])


@pytest.mark.parametrize("name", NAMES)
def test_company_and_checkpoints_change_no_bit(name: str) -> None:
    case = a_case(name, 14)
    together, alone = BlocksOfStates(case, 8), BlocksOfStates(case, 8)
    together.data[:3] = alone.data[:3] = torch.randn(3, together.data.shape[1])
    found = compute(case, together, (0, 1, 2, -1), (1, 3, 0, 5), (3, 8, 0, 6), (8, 12, 0, -1), (12, 14, 1, 7))
    for first, stop, block in ((0, 1, 2), (1, 12, 0), (12, 14, 1)):
        rows = compute(case.rows(slice(first, stop)), alone, (0, stop - first, block, NO_BLOCK))
        assert torch.equal(rows, found[first:stop])
        assert torch.equal(together.data[block], alone.data[block])
    assert torch.equal(together.data[7], together.data[1])
    resumed = compute(case.rows(slice(8, 12)), together, (0, 4, 6, NO_BLOCK))
    assert torch.equal(resumed, found[8:12])
    assert torch.equal(together.data[6], together.data[0])


@pytest.mark.parametrize("name", ["convolution", "by channel"])
def test_rows_of_sixteen_bits(name: str) -> None:
    """Only inputs and results are rounded to 16 bits; states equal those of the rounded inputs."""
    case = a_case(name, 6)
    half = replace(case, inputs=type(case.inputs)(*(None if x is None else x.bfloat16() for x in case.inputs)))
    wide = replace(case, inputs=type(case.inputs)(*(None if x is None else x.float() for x in half.inputs)))
    pools = [BlocksOfStates(case, 1) for _ in range(2)]
    for pool in pools:
        pool.data[:] = 0
    found, expected = compute(half, pools[0], (0, 6, 0, NO_BLOCK)), compute(wide, pools[1], (0, 6, 0, NO_BLOCK))
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(pools[0].data, pools[1].data)


@pytest.mark.parametrize("name", ["delta", "by channel", "mamba"])
def test_large_numbers_stay_numbers(name: str) -> None:
    """Decays, betas and gates stay finite for inputs whose exponential overflows."""
    case = a_case(name, 6)
    inputs: Any = case.inputs
    wild = replace(case, inputs=inputs._replace(decays=inputs.decays.sign() * 1e4, gate=inputs.gate * 1e4))
    pool = BlocksOfStates(case, 1)
    pool.data[:] = 0
    found = compute(wild, pool, (0, 6, 0, NO_BLOCK))
    assert found.isfinite().all()
    close(found, reference(wild), 1e-5)
