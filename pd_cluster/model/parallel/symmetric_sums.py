"""Sums over the GPUs of one instance in symmetric memory: a buffer of each that all of them can read and write.

A decode step's sums are small, and most of their time in NCCL is latency. Here one kernel adds, on each GPU a part of
the numbers, and writes the sums to all: every rank gets the same bits. Where there is an NVSwitch, it adds. torch's
interface is not public, so it is used in this file alone. Not run on GPUs yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError, called, first_line
from pd_cluster.settings.engine_config import SYMMETRIC_SUMS

NAME = "pd-cluster ranks"  # of the group, known to torch in this process
MOST_NBYTES = 1 << 20  # of one sum; NCCL's bandwidth wins beyond
MULTIPLE_NBYTES = 16  # of a sum and of its parts' beginnings
DTYPES = (torch.bfloat16, torch.float32)  # that the kernels add
SETTING = called("cuda_speedups")


class SymmetricSums:
    """Sums that each rank asks for in the same order, on one stream."""

    def __init__(self, store: Any, rank: int, size: int, device: Device) -> None:
        """Meets the other ranks at `store`. Raises ConfigError if these GPUs cannot map each other's memory."""
        try:
            self._buffer, has_multicast = _shared(store, rank, size, device)
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(f"{SETTING} {SYMMETRIC_SUMS}: {first_line(error)}; leave it out") from error
        ops = torch.ops.symm_mem
        self._add = ops.multimem_all_reduce_ if has_multicast else ops.two_shot_all_reduce_

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x, which is contiguous, is added here."""
        return x.dtype in DTYPES and 0 < x.nbytes <= MOST_NBYTES and x.nbytes % MULTIPLE_NBYTES == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x with the sum of every rank's.

        The kernel waits for all ranks at its start and at its end, so the buffer may be filled again at once.
        """
        flat = x.view(-1)
        shared = self._buffer.view(x.dtype)[: len(flat)]
        shared.copy_(flat)
        self._add(shared, "sum", NAME)
        flat.copy_(shared)
        return x


def _shared(store: Any, rank: int, size: int, device: Device) -> tuple[torch.Tensor, bool]:
    """Returns this rank's buffer, mapped by all, and whether its addresses can stand for all of them."""
    _SymmetricMemory.set_group_info(NAME, rank, size, store)
    buffer: torch.Tensor = _SymmetricMemory.empty_strided_p2p(
        (MOST_NBYTES,), (1,), torch.uint8, torch.device(device.torch_name), NAME
    )
    return buffer, bool(_SymmetricMemory.rendezvous(buffer, NAME).multicast_ptr)
