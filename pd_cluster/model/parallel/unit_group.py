"""Exchanges rows between the instances of a unit, over gloo on CPU: one member per instance, all ranks with the same
tensor-parallel index.

Does not deal with models, nor with how the members found each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch

from pd_cluster.errors import InstanceLost, first_line

TAG = 1  # messages between two ranks arrive in order
LOAD_TIMEOUT_S = 600.0  # how long until all members have checked their models


class UnitGroup:
    """Implements model.layers.expert_share.ExpertUnit, for member `rank` of `size`.

    Raises InstanceLost if another member is lost, or delays all others for too long.
    """

    def __init__(self, rank: int, size: int, meet: Callable[[], Any], timeout_s: float) -> None:
        """`meet` returns the process group once all members are connected. `timeout_s`: the limit of an exchange during
        a step.
        """
        self.rank, self.size = rank, size
        self.rows: Sequence[int] | None = None  # each member's number of rows in this step; None: the same for all
        self.exchange_s = 0.0
        self._meet = meet
        self._group: Any = None
        self._timeout, self._step_timeout = timedelta(seconds=LOAD_TIMEOUT_S), timedelta(seconds=timeout_s)
        self._num_rows: list[int] = []  # each member's number of rows in the last `gather`

    def form(self) -> None:
        self._group = self._meet()

    def loaded(self) -> None:
        """Replaces the timeout for loading by the timeout for a step."""
        self._timeout = self._step_timeout

    def agree(self, number: int) -> list[int]:
        """Returns the numbers of all members, in member order."""
        own = torch.tensor([[number]], dtype=torch.int64)
        found: list[int] = self._joined([own], [1] * self.size)[0].flatten().tolist()
        return found

    def gather(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ExpertExchange. Rows are sent without copying; a separate message has indexes and weights."""
        num_rows = [len(x)] * self.size if self.rows is None else list(self.rows)
        assert num_rows[self.rank] == len(x)  # the members have exchanged these numbers
        self._num_rows = num_rows
        top_k = chosen.shape[1]
        routes = torch.cat([chosen.to(torch.int32), weights.contiguous().view(torch.int32)], dim=1)
        rows, routes = self._joined([x.contiguous(), routes], num_rows)
        return rows, routes[:, :top_k].long(), routes[:, top_k:].contiguous().view(torch.float32)

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        ours = _split(partials.contiguous(), self._num_rows)
        theirs = [torch.empty_like(ours[self.rank]) for _ in range(self.size)]
        theirs[self.rank] = ours[self.rank]
        self._swap((ours, theirs))
        first, second, *others = theirs
        total = first + second
        for other in others:
            total += other
        return total

    def _joined(self, own: Sequence[torch.Tensor], num_rows: Sequence[int]) -> list[torch.Tensor]:
        """Returns each tensor of `own` for all members, concatenated in member order."""
        found, swaps = [], []
        for each in own:
            joined = each.new_empty(sum(num_rows), each.shape[1])
            parts = _split(joined, num_rows)
            parts[self.rank].copy_(each)
            found.append(joined)
            swaps.append(([each] * self.size, parts))
        self._swap(*swaps)
        return found

    def _swap(self, *swaps: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]) -> None:
        """For each (ours, theirs), sends `ours[m]` to each other member m, and fills `theirs[m]` with what m sends.

        Empty tensors are skipped.
        """
        assert self._group is not None  # see `form`
        started_s = time.perf_counter()
        mates = [m for m in range(self.size) if m != self.rank]
        works = [self._begin(self._group.recv, theirs[m], m) for _, theirs in swaps for m in mates if theirs[m].numel()]
        works += [self._begin(self._group.send, ours[m], m) for ours, _ in swaps for m in mates if ours[m].numel()]
        for member, work in works:
            self._wait(member, work)
        self.exchange_s += time.perf_counter() - started_s

    def _begin(self, call: Any, x: torch.Tensor, member: int) -> tuple[int, Any]:
        try:
            return member, call([x], member, TAG)
        except RuntimeError as error:  # the connection is closed
            raise self._lost(member, error) from error

    def _wait(self, member: int, work: Any) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(member, error) from error

    def _lost(self, member: int, error: RuntimeError) -> InstanceLost:
        return InstanceLost(f"member {member} of {self.size} of this unit is lost: {first_line(error)}")


def _split(x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Returns consecutive rows of x, as views."""
    ends = list(accumulate(sizes))
    return [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]
