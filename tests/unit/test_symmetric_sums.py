"""Sums in symmetric memory, without GPUs: which tensors, where, and by which torch operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory

from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError
from pd_cluster.model.parallel import symmetric_sums
from pd_cluster.model.parallel.symmetric_sums import MOST_NBYTES, NAME, SymmetricSums

CUDA = Device("cuda")


class Machine:
    """Replaces torch's operators; both ranks contribute the same numbers."""

    def __init__(self, has_multicast: bool = False) -> None:
        self.has_multicast = has_multicast
        self.buffer = torch.full((MOST_NBYTES,), 99, dtype=torch.uint8)
        self.called: list[str] = []

    def shared(self, *given: Any) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.has_multicast

    def __getattr__(self, name: str) -> Any:
        def add(x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
            assert (operation, group) == ("sum", NAME)
            assert x.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
            assert x.storage_offset() == 0
            self.called.append(name)
            return x.mul_(2)

        return add


@pytest.fixture(params=[False, True], ids=["two shots", "multicast"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(request.param)
    monkeypatch.setattr(symmetric_sums, "_shared", machine.shared)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(symm_mem=machine))
    return machine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_replaces_its_numbers(machine: Machine, dtype: torch.dtype) -> None:
    """Supported sums are in place; other sums are left to NCCL."""
    sums = SymmetricSums(None, 0, 2, CUDA)
    for num_rows in (7, 2, 100):
        x = torch.randn(num_rows, 64).to(dtype)
        expected = x * 2
        assert sums.takes(x)
        assert sums.sum(x) is x
        assert torch.equal(x, expected)
    assert set(machine.called) == {"multimem_all_reduce_" if machine.has_multicast else "two_shot_all_reduce_"}
    assert sums.takes(torch.zeros(MOST_NBYTES // 2, dtype=torch.bfloat16))
    others = [torch.zeros(MOST_NBYTES // 2 + 8, dtype=torch.bfloat16), torch.zeros(0, 64), torch.zeros(3, 5)]
    others += [torch.zeros(8, 8, dtype=kind) for kind in (torch.float16, torch.int32)]
    assert not any(sums.takes(x) for x in others)


def test_gpus_that_cannot_share_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(*given: Any) -> Any:
        raise RuntimeError("no peer access\nand a stack")

    monkeypatch.setattr(symmetric_sums, "_shared", shared)
    with pytest.raises(ConfigError, match=r"--cuda-speedups symmetric-sums: no peer access; remove it$"):
        SymmetricSums(None, 0, 2, CUDA)


@pytest.mark.parametrize("name", ["two_shot_all_reduce_", "multimem_all_reduce_"])
def test_torch_has_the_operators(name: str) -> None:
    """torch's interface is not public, so check that the expected operators and methods exist."""
    schema = str(getattr(torch.ops.symm_mem, name).default._schema)
    assert schema == f"symm_mem::{name}(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)"
    for method in ("set_group_info", "empty_strided_p2p", "rendezvous", "multicast_ptr"):
        assert hasattr(_SymmetricMemory, method)
