"""The arguments of NCCL and HCCL groups between the ranks of one instance."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.devices.hccl_environment import GROUP_BUFFER_MB, UNIT_BUFFER_MB
from pd_cluster.devices.process_groups import make_unit
from pd_cluster.model.parallel.rank_group import DeviceGroup, Rendezvous, join
from tests.support.fake_device import FakeGroup, install

WAIT_S = 60.0


class Adding(FakeGroup):
    """A group whose other ranks have sent ones; records timeouts."""

    limit: timedelta | None = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Adding:
        tensors[0].add_(1)
        return self

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Adding:
        for rank, output in enumerate(outputs[0]):
            output.copy_(inputs[0] if rank == self.rank else torch.ones_like(output))
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Adding:
        assert options.rootRank == 0
        if self.rank:
            tensors[0].fill_(1)
        return self

    def wait(self) -> None: ...

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.limit = limit


@pytest.fixture(params=["cuda", "npu"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    install(monkeypatch)
    monkeypatch.setattr("pd_cluster.devices.device.process_group", lambda device: Adding)
    kind: DeviceKind = request.param

    def meet(rank: int) -> Any:
        return join(Rendezvous(str(tmp_path / "ranks"), rank, 2, 3.0, WAIT_S), Device(kind, rank))

    with ThreadPoolExecutor(2) as threads:
        yield kind, list(threads.map(meet, range(2), timeout=WAIT_S))


def test_ranks_sum_and_gather_over_their_devices(groups: tuple[DeviceKind, list[DeviceGroup]]) -> None:
    _, (first, second) = groups
    assert first.sum(torch.tensor([3.0])).tolist() == [4.0]
    assert first.gather(torch.tensor([3.0])).tolist() == [3.0, 1.0]
    assert second.gather(torch.tensor([3.0])).tolist() == [3.0]
    rows = torch.tensor([[3.0], [4.0]])
    assert first.gather_to_all(rows).tolist() == [[3.0, 1.0], [4.0, 1.0]]
    assert second.gather_to_all(rows).tolist() == [[1.0, 3.0], [1.0, 4.0]]
    assert [group.spread(torch.tensor([3])).tolist() for group in (first, second)] == [[3], [1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_order_add_the_ranks_in_float32_and_round_once(
    groups: tuple[DeviceKind, list[DeviceGroup]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have different numbers, of which a bfloat16 sum would lose the small ones."""
    parts = [256.0, 1.0, 1.0, 1.0]

    def gathered(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        for output, part in zip(outputs[0], parts, strict=True):
            output.fill_(part)
        return self

    def summed(self: Any, tensors: list[torch.Tensor], options: Any) -> Any:
        raise AssertionError("NCCL must not choose the order of a sum")

    monkeypatch.setattr(Adding, "allgather", gathered)
    monkeypatch.setattr(Adding, "allreduce", summed)
    _, (first, _) = groups
    first.size, first.sums_in_order = len(parts), True
    x = torch.tensor([[256.0, 256.0]], dtype=dtype)
    found = first.sum(x)
    assert found.data_ptr() == x.data_ptr()
    assert found.dtype == dtype
    assert found.tolist() == [[float(torch.tensor(259.0).to(dtype))] * 2]


def test_a_group_is_told_what_its_backend_needs(groups: tuple[DeviceKind, list[DeviceGroup]]) -> None:
    kind, both = groups
    for group in both:
        group.loaded()
    assert len(FakeGroup.made) == 2
    for made in FakeGroup.made:
        options = made.options
        assert options._timeout == timedelta(seconds=WAIT_S)
        if kind == "npu":
            assert options.hccl_config == {"hccl_buffer_size": GROUP_BUFFER_MB}
            assert options.global_ranks_in_group == [0, 1]
            assert options.group_id == "ranks"
        assert options.is_high_priority_stream == (kind == "cuda")  # it is captured; copies use other streams
        assert isinstance(made, Adding)
        assert made.limit == timedelta(seconds=3)
    made = make_unit(HashStore(), 0, 2, WAIT_S, Device(kind))
    assert made.options._timeout == timedelta(seconds=WAIT_S)
    assert not made.options.is_high_priority_stream
    if kind == "npu":
        assert made.options.hccl_config == {"hccl_buffer_size": UNIT_BUFFER_MB}
        assert made.options.group_id == "unit"
        assert made.options.global_ranks_in_group == [0, 1]
