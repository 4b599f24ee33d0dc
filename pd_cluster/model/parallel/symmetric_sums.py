"""Sums over the GPUs of one instance in symmetric memory: each GPU has a buffer that all GPUs can read and write.

A decode step's sums are small, and most of their time with NCCL is latency. Here one kernel per GPU adds a part of the
values and writes the sums to all GPUs, so every rank gets the same bits. An NVSwitch, if there is one, does the
addition. torch's interface is not public, so only this file uses it. Not tested on GPUs yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError, called, first_line
from pd_cluster.settings.engine_config import SYMMETRIC_SUMS

NAME = "pd-cluster ranks"  # the name under which torch registers the group in this process
MOST_NBYTES = 1 << 20  # the largest sum; NCCL has more bandwidth for larger ones
MULTIPLE_NBYTES = 16  # sizes of a sum and offsets of its parts are multiples of this
DTYPES = (torch.bfloat16, torch.float32)  # supported by the kernels
SETTING = called("cuda_speedups")


class SymmetricSums:
    """Sums on one stream, which all ranks request in the same order."""

    def __init__(self, store: Any, rank: int, size: int, device: Device) -> None:
        """Connects to the other ranks at `store`. Raises ConfigError if these GPUs cannot map each other's memory."""
        try:
            self._buffer, has_multicast = _shared(store, rank, size, device)
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(f"{SETTING} {SYMMETRIC_SUMS}: {first_line(error)}; remove it") from error
        ops = torch.ops.symm_mem
        self._add = ops.multimem_all_reduce_ if has_multicast else ops.two_shot_all_reduce_

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x, which is contiguous, can be summed here."""
        return x.dtype in DTYPES and 0 < x.nbytes <= MOST_NBYTES and x.nbytes % MULTIPLE_NBYTES == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x with the sum of every rank's x.

        The kernel waits for all ranks at its start and at its end, so the buffer can be filled again at once.
        """
        flat = x.view(-1)
        shared = self._buffer.view(x.dtype)[: len(flat)]
        shared.copy_(flat)
        self._add(shared, "sum", NAME)
        flat.copy_(shared)
        return x


def _shared(store: Any, rank: int, size: int, device: Device) -> tuple[torch.Tensor, bool]:
    """Returns this rank's buffer, which all ranks have mapped, and whether it has a multicast address."""
    _SymmetricMemory.set_group_info(NAME, rank, size, store)
    buffer: torch.Tensor = _SymmetricMemory.empty_strided_p2p(
        (MOST_NBYTES,), (1,), torch.uint8, torch.device(device.torch_name), NAME
    )
    return buffer, bool(_SymmetricMemory.rendezvous(buffer, NAME).multicast_ptr)
