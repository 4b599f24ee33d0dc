"""Units of instances on simulated NPUs exchange rows by HCCL's class over gloo. Run by tests/model/test_npu.py."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pd_cluster.devices.device import Device, bind
from pd_cluster.engine.unit.unit_meeting import gloo_group
from pd_cluster.model.parallel.device_unit_group import DeviceUnitGroup, UnitEnds, device_end
from pd_cluster.transport.meeting import Meeting
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, random_prompt
from tests.support.unit_threads import Hall, run_in_step, unit

WAIT_S = 20.0
MAX_TOKENS = 8
SETTINGS: dict[str, Any] = {
    "num_blocks": 24,
    "max_model_len": 300,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _bound() -> None:
    bind("npu", (), 0)  # imports torch-npu


def meet(store: Any, rank: int, size: int) -> UnitEnds:
    return UnitEnds(gloo_group(store, rank, size, "127.0.0.1"), device_end(store, rank, size, Device("npu", rank)))


def members(size: int) -> list[DeviceUnitGroup]:
    """Returns connected ends; their keys are encoded as between processes."""
    meetings: list[Meeting] = []

    def post(rank: int, key: str, value: bytes) -> None:
        for other, meeting in enumerate(meetings):
            if other != rank:
                meeting.put(key, value)

    def ends(rank: int) -> UnitEnds:
        with meetings[rank].held():
            return meet(meetings[rank].store, rank, size)

    meetings += [Meeting(WAIT_S, partial(post, rank), size - 1) for rank in range(size)]
    return [DeviceUnitGroup(rank, size, partial(ends, rank), WAIT_S) for rank in range(size)]


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.bfloat16), (3, torch.float32)])
def test_rows_are_exchanged_and_added_in_float32_in_the_order_of_members(size: int, dtype: torch.dtype) -> None:
    """Covers members with any number of rows, none included; each result is rounded once."""
    rng, made = random.Random(size), torch.Generator().manual_seed(size)
    steps = [[rng.choice((0, 1, 5, 64)) for _ in range(size)] for _ in range(10)] + [[0] * size, [3] * size]
    rows = [[torch.randn(num, 24, generator=made).to(dtype) for num in step] for step in steps]
    parts = [(torch.randn(size, sum(step), 24, generator=made) * 1e3).to(dtype) for step in steps]
    barrier = threading.Barrier(size)

    def member(group: DeviceUnitGroup) -> None:
        barrier.wait(WAIT_S)
        group.form()
        group.loaded()
        for step, xs, partials in zip(steps, rows, parts, strict=True):
            own = step[group.rank]
            told = group.agree(own)
            assert told == step
            group.rows = None if step == [3] * size else told
            chosen, weights = torch.full((own, 3), 200 + group.rank), torch.full((own, 3), group.rank + 0.1)
            found = group.gather(xs[group.rank], chosen, weights)
            of_all = torch.cat([torch.full((num, 3), rank) for rank, num in enumerate(step)])
            assert torch.equal(found[0], torch.cat(xs))
            assert torch.equal(found[1], 200 + of_all)
            assert torch.equal(found[2], of_all + 0.1)
            assert [each.dtype for each in found] == [dtype, torch.int64, torch.float32]
            assert all(each.is_contiguous() for each in found)
            start = sum(step[: group.rank])
            total = partials[0, start : start + own].float()
            for other in partials[1:]:
                total = total + other[start : start + own]
            assert torch.equal(group.combine(partials[group.rank]), total.to(dtype))

    with ThreadPoolExecutor(size) as threads:
        for each in [threads.submit(member, group) for group in members(size)]:
            each.result(2 * WAIT_S)


class Agreeing(DeviceUnitGroup):
    """Exchanges the members' numbers of rows in each layer, because a test's threads have no rounds."""

    is_loaded = False

    def loaded(self) -> None:
        super().loaded()
        self.is_loaded = True

    def gather(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        if self.is_loaded:
            self.rows = self.agree(len(x))
        return super().gather(x, chosen, weights)


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_units_tokens_are_those_of_transformers(
    tp_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One member computes two prompts in chunks; the other computes one, then takes part without rows."""
    folder = make_checkpoint(tmp_path, "qwen3_moe", head_dim=128, max_position_embeddings=1024)
    rng = random.Random(7)
    prompts = [random_prompt(rng, length) for length in (120, 9, 30)]

    made: list[Agreeing] = []

    def end(hall: Hall, rank: int) -> Agreeing:
        def ends() -> UnitEnds:
            stores = hall.swap(rank, HashStore() if rank == 0 else None)
            return meet(stores[0], rank, len(stores))

        made.append(Agreeing(rank, 2, ends, WAIT_S))
        return made[-1]

    def request(at: int) -> Request:
        most = MAX_TOKENS if at < 2 else 2
        return Request(f"r{at}", RequestSpec(prompts[at], Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)))

    with caplog.at_level("INFO"), unit(folder, 2, tp_size, end, device=Device("npu"), **SETTINGS) as cores:
        for each in made:
            each.loaded()
        found = run_in_step(cores, [[request(0), request(1)], [request(2)]])
        assert not any(core.runner.goes_ahead for core in cores)
    tokens = {name: [token.token_id for token in each] for of_one in found for name, each in of_one.items()}
    outputs = [tokens[f"r{at}"] for at in range(3)]
    assert_all_same(folder, prompts, outputs, [MAX_TOKENS, MAX_TOKENS, 2])
    assert "decode steps run eagerly: instances of a unit agree on each step" in caplog.text
    assert (
        f"{0.390625 * (1 + (tp_size > 1)):.2f} GiB are reserved for communicators, 0 of them for KV transfers"
        in caplog.text
    )
