"""Exchanges rows between the devices of a unit's instances: NCCL on CUDA, HCCL on NPUs.

The members tell each other their numbers of rows before a step, over the hosts, so that no host waits for a device
within the step. Does not deal with models, nor with how the members found each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from pd_cluster.devices import process_groups as device_group
from pd_cluster.devices.device import Device
from pd_cluster.errors import InstanceLost, first_line
from pd_cluster.model.parallel.unit_group import LOAD_TIMEOUT_S, UnitGroup


class UnitEnds(NamedTuple):
    """One rank's connections to the other members: a group between hosts, and a process group between devices (None on
    CPUs).
    """

    host: Any
    device: Any


class DeviceUnitGroup:
    """Implements model.layers.expert_share.ExpertUnit on an accelerator, for member `rank` of `size`.

    Calls are launched in order on each device, and the host does not wait. So errors of NCCL or HCCL end the process,
    at the latest after the timeout. `agree`, or the connection to a member, detects that a member is lost.
    """

    def __init__(self, rank: int, size: int, meet: Callable[[], UnitEnds], timeout_s: float) -> None:
        """`meet` returns this rank's connections once all members are connected. `timeout_s`: the limit of an exchange
        during a step.
        """
        self.rank, self.size = rank, size
        self.rows: Sequence[int] | None = None  # each member's number of rows in this step; None: the same for all
        self._host = UnitGroup(rank, size, self._joined, timeout_s)
        self._meet, self._timeout = meet, timedelta(seconds=timeout_s)
        self._group: Any = None
        self._num_rows: list[int] = []  # each member's number of rows in the last `gather`

    @property
    def exchange_s(self) -> float:
        """Returns the seconds spent in `agree`. The time of row exchanges is not known, because the host does not wait
        for them.
        """
        return self._host.exchange_s

    def form(self) -> None:
        self._host.form()

    def _joined(self) -> Any:
        ends = self._meet()
        self._group = ends.device
        return ends.host

    def loaded(self) -> None:
        """Replaces the timeout for loading by the timeout for a step."""
        self._host.loaded()
        self._group._set_default_timeout(self._timeout)

    def agree(self, number: int) -> list[int]:
        """Returns the numbers of all members, in member order. The host waits for them."""
        return self._host.agree(number)

    def gather(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ExpertExchange. Expert indexes are sent with the weights, as float32, which represents them exactly."""
        num_rows = [len(x)] * self.size if self.rows is None else list(self.rows)
        assert num_rows[self.rank] == len(x)  # the members have exchanged these numbers
        self._num_rows, top_k = num_rows, chosen.shape[1]
        rows, numbers = self._to_all(x, torch.cat((chosen.to(weights.dtype), weights), dim=1))
        return rows, numbers[:, :top_k].long(), numbers[:, top_k:].contiguous()

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        """See ExpertExchange. The sum is in float32 and in member order, and is rounded once."""
        if not sum(self._num_rows):
            return partials
        width, own = partials.shape[1], self._num_rows[self.rank]
        parts = partials.new_empty(self.size, own, width)
        sent = [num * width for num in self._num_rows]
        self._begin(parts.view(-1), partials.reshape(-1), [own * width] * self.size, sent).wait()
        first, *others = parts
        total: torch.Tensor = first.float()
        for other in others:
            total += other
        return total.to(partials.dtype)

    def _to_all(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """Returns, for each of the tensors [own rows, columns], the rows of all members, joined in member order."""
        found = [each.new_empty(sum(self._num_rows), each.shape[1]) for each in given]
        if not sum(self._num_rows):
            return found
        works = []
        for own, joined in zip(given, found, strict=True):
            received = [num * own.shape[1] for num in self._num_rows]
            works.append(
                self._begin(joined.view(-1), own.reshape(-1).repeat(self.size), received, [own.numel()] * self.size)
            )
        for work in works:
            work.wait()
        return found

    def _begin(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> Any:
        assert self._group is not None  # see `form`
        try:
            return _all_to_all(self._group, received, sent, received_sizes, sent_sizes)
        except RuntimeError as error:
            raise InstanceLost(
                f"member {self.rank} of a unit of {self.size} lost another member: {first_line(error)}"
            ) from error


def device_end(store: Store, rank: int, size: int, device: Device) -> Any:
    """Returns the process group of all members' devices, once each member has received the ranks of all others.

    The first exchange sets up a communicator, with keys in the store. Raises RuntimeError if that fails, and
    InstanceLost if a member receives a wrong rank.
    """
    group = device_group.make_unit(PrefixStore(device.dist_backend, store), rank, size, LOAD_TIMEOUT_S, device)
    own = torch.full((size,), rank, dtype=torch.float32, device=device.torch_name)
    found = torch.empty_like(own)
    _all_to_all(group, found, own, [1] * size, [1] * size).wait()
    if found.tolist() != [*range(size)]:
        raise InstanceLost(f"{device.dist_backend.upper()} gave this member wrong ranks of its unit: {found.tolist()}")
    return group


def _all_to_all(
    group: Any, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
) -> Any:
    """Begins an exchange of one-dimensional tensors. With more dimensions, torch would count sizes in rows, and
    torch-npu in elements.
    """
    return group.alltoall_base(received, sent, received_sizes, sent_sizes, AllToAllOptions())
