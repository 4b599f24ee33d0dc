"""Collective operations of one instance's ranks: sums over all ranks, and gathers of the ranks' parts of rows.

gloo on CPU, NCCL on CUDA, HCCL on NPUs, between processes of one host. Does not deal with models or plans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
)

from pd_cluster.devices import process_groups as device_group
from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import InstanceLost
from pd_cluster.model.parallel.symmetric_sums import SymmetricSums

TAG = 1  # messages between two ranks arrive in order
HOST = "127.0.0.1"  # all devices of an instance are on one host


class Group(Protocol):
    """`reduce_s`: the seconds since the start spent in sums and in gathers to all ranks."""

    rank: int
    size: int
    reduce_s: float

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' x, with the same bits on all ranks; overwrites x."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' x, joined along the last dimension, on rank 0; on other ranks returns x itself."""

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' x, joined along the last dimension, on every rank."""

    def spread(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Returns on every rank the x of rank `source`; overwrites x on the other ranks."""

    def least(self, number: int) -> int:
        """Returns the smallest number that any rank passes."""

    def loaded(self) -> None:
        """Replaces the timeout for loading by the timeout for a step."""


class SingleRank:
    """The group of a single rank, which has the whole model."""

    rank, size = 0, 1
    reduce_s = 0.0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def spread(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    def loaded(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The place where an instance's ranks find each other: a file in a folder that only their user can enter."""

    path: str
    rank: int
    size: int
    timeout_s: float  # how long a rank waits for the others in a step
    load_timeout_s: float = 600.0  # the time until all ranks have loaded their weights


class GlooGroup:
    """Ranks on CPUs. Raises InstanceLost if another rank is lost, or delays the others for longer than the timeout."""

    def __init__(self, place: Rendezvous) -> None:
        self.rank, self.size = place.rank, place.size
        self.reduce_s = 0.0
        self._timeout = timedelta(seconds=place.load_timeout_s)
        self._step_timeout = timedelta(seconds=place.timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = self._timeout
        options._threads = 1
        try:
            self.store = FileStore(place.path, place.size)
            self.store.set_timeout(self._timeout)
            self._group: Any = ProcessGroupGloo(self.store, place.rank, place.size, options)
        except RuntimeError as error:
            raise InstanceLost(f"rank {place.rank} of {place.size} could not connect to the others: {error}") from error

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        started_s = time.perf_counter()
        x = x.contiguous()
        if self._doubles:
            self._double(x)
        else:
            self._wait(self._group.allreduce([x], AllreduceOptions()))
        self.reduce_s += time.perf_counter() - started_s
        return x

    def _double(self, x: torch.Tensor) -> None:
        """Sums by recursive doubling: over pairs, then over pairs of pairs. In a step, this takes a fraction of the
        time of gloo's own sums.

        All ranks add the same pairs, and addition is commutative, so they get the same bits.
        """
        distance = 1
        while distance < self.size:
            theirs = torch.empty_like(x)
            self._swap(x, theirs, self.rank ^ distance)
            x += theirs
            distance *= 2

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor:
        started_s = time.perf_counter()
        parts = x.new_empty(self.size, *x.shape)
        parts[self.rank] = x
        if self._doubles:  # as in `_double`: pairs exchange their pieces, then pairs of pairs
            distance = 1
            while distance < self.size:
                own = self.rank & ~(distance - 1)
                other = own ^ distance
                self._swap(parts[own : own + distance], parts[other : other + distance], self.rank ^ distance)
                distance *= 2
        else:
            self._wait(self._group.allgather([list(parts)], [x.contiguous()]))
        joined = torch.cat(list(parts), dim=-1)
        self.reduce_s += time.perf_counter() - started_s
        return joined

    def _swap(self, ours: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
        """Sends `ours` to another rank, and fills `theirs` with what that rank sends."""
        received = self._start(self._group.recv, theirs, other)
        self._wait(self._start(self._group.send, ours, other))
        self._wait(received)

    @property
    def _doubles(self) -> bool:
        return not self.size & (self.size - 1)

    def _start(self, operation: Any, x: torch.Tensor, other: int) -> Any:
        try:
            return operation([x], other, TAG)
        except RuntimeError as error:  # the connection is closed
            raise self._lost(error) from error

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(self._group.gather([parts] if parts else [], [x], GatherOptions()))
        return torch.cat(parts, dim=-1) if parts else x

    def spread(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        x = x.contiguous()
        self._wait(self._group.broadcast([x], _from(source)))
        return x

    def loaded(self) -> None:
        self._timeout = self._step_timeout

    def least(self, number: int) -> int:
        x = torch.tensor([number])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        self._wait(self._group.allreduce([x], options))
        return int(x.item())

    def _wait(self, work: Any) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> InstanceLost:
        return InstanceLost(f"rank {self.rank} of {self.size} lost another rank: {error}")


def _from(source: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = source
    return options


class DeviceGroup:
    """Sums and gathers on the devices, in stream order; the host does not wait.

    So errors of NCCL or HCCL end the process, at the latest after the timeout. Numbers on the host are exchanged over
    gloo.

    NCCL and HCCL choose the order of a sum by the number of values. With `sums_in_order`, each rank instead receives
    the values of all ranks, adds them in float32 in rank order, and rounds once. `is_symmetric`:
    symmetric_sums.py computes small sums.
    """

    def __init__(
        self, place: Rendezvous, device: Device, sums_in_order: bool = False, is_symmetric: bool = False
    ) -> None:
        self.rank, self.size = place.rank, place.size
        self.reduce_s = 0.0  # not measured: the host does not wait
        self._host = GlooGroup(place)
        store = PrefixStore(device.dist_backend, self._host.store)
        self._group: Any = device_group.make_ranks(store, place.rank, place.size, place.load_timeout_s, device)
        self._timeout = timedelta(seconds=place.timeout_s)
        self.sums_in_order = sums_in_order
        self._symmetric: SymmetricSums | None = None
        if is_symmetric and not sums_in_order:
            self._symmetric = SymmetricSums(PrefixStore("symmetric", self._host.store), place.rank, place.size, device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self.sums_in_order:
            first, *others = self._parts(x)
            total = first.float()
            for other in others:
                total += other
            return x.copy_(total)
        if self._symmetric is not None and self._symmetric.takes(x):
            return self._symmetric.sum(x)
        self._group.allreduce([x], AllreduceOptions()).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = self._parts(x)
        return torch.cat(parts, dim=-1) if self.rank == 0 else x

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts(x.contiguous()), dim=-1)

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns the x of every rank, each contiguous."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def spread(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        x = x.contiguous()
        self._group.broadcast([x], _from(source)).wait()
        return x

    def least(self, number: int) -> int:
        return self._host.least(number)

    def loaded(self) -> None:
        self._host.loaded()
        self._group._set_default_timeout(self._timeout)


def join(
    place: Rendezvous | None, device: Device = CPU, sums_in_order: bool = False, is_symmetric: bool = False
) -> Group:
    """Joins the group of an instance's ranks. `sums_in_order`, `is_symmetric`: see `DeviceGroup`.

    Raises InstanceLost, and ConfigError if symmetric memory is not available.
    """
    if place is None or place.size == 1:
        return SingleRank()
    if not device.is_accelerator:
        return GlooGroup(place)
    return DeviceGroup(place, device, sums_in_order, is_symmetric and device.dist_backend == "nccl")
