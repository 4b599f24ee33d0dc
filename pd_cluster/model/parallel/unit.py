"""Exchanges rows among the instances of a unit: one end for each rank, all of one tensor-parallel index. gloo on CPU.

Knows nothing of models, nor of how the members found each other.
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
LOAD_TIMEOUT_S = 600.0  # until all members have proven the model


class UnitGroup:
    """Satisfies model.layers.expert_share.ExpertUnit.

    `rank` among the `size` members. Raises InstanceLost when another member is gone, or delays all others for too long.
    """

    def __init__(self, rank: int, size: int, meet: Callable[[], Any], timeout_s: float) -> None:
        """`meet` returns the process group, once all members are there. `timeout_s`: of an exchange in a step."""
        self.rank, self.size = rank, size
        self.rows: Sequence[int] | None = None  # of each member in this step; None: as many as here
        self.exchange_s = 0.0
        self._meet = meet
        self._group: Any = None
        self._timeout, self._step_timeout = timedelta(seconds=LOAD_TIMEOUT_S), timedelta(seconds=timeout_s)
        self._num_rows: list[int] = []  # of each member, since the last `gather`

    def form(self) -> None:
        self._group = self._meet()

    def loaded(self) -> None:
        """Switches from the timeout of loading to that of a step."""
        self._timeout = self._step_timeout

    def agree(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all members, in their order; each has as many."""
        told = torch.tensor([numbers] * self.size, dtype=torch.int64)
        self._swap([told[self.rank]] * self.size, list(told))
        found: list[list[int]] = told.tolist()
        return found

    def gather(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ExpertExchange. One message to each member has all three."""
        started_s = time.perf_counter()
        num_rows = [len(x)] * self.size if self.rows is None else list(self.rows)
        assert num_rows[self.rank] == len(x)  # what all members have agreed on
        self._num_rows = num_rows
        own = torch.cat([_bytes_of(each) for each in (x, chosen, weights)], dim=1)  # [num_rows, bytes of a row]
        joined = own.new_empty(sum(num_rows), own.shape[1])
        parts = _split(joined, num_rows)
        parts[self.rank].copy_(own)
        self._swap([own] * self.size, parts)
        first, second, third = _columns_of(joined, (x, chosen, weights))
        self.exchange_s += time.perf_counter() - started_s
        return first, second, third

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        started_s = time.perf_counter()
        ours = _split(partials.contiguous(), self._num_rows)
        theirs = [torch.empty_like(ours[self.rank]) for _ in range(self.size)]
        theirs[self.rank] = ours[self.rank]
        self._swap(ours, theirs)
        total, *others = theirs
        if self.rank == 0:
            total = total.clone()  # it is a part of the caller's tensor
        for other in others:
            total += other
        self.exchange_s += time.perf_counter() - started_s
        return total

    def _swap(self, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
        """Sends `ours[m]` to each other member m, and fills `theirs[m]` with what it sends; empty ones are left out."""
        assert self._group is not None  # see `form`
        group, member, works = self._group, self.rank, []
        others = [m for m in range(self.size) if m != self.rank]
        calls = [(m, group.recv, theirs[m]) for m in others] + [(m, group.send, ours[m]) for m in others]
        try:
            for member, call, rows in calls:
                if rows.numel():
                    works.append((member, call([rows], member, TAG)))
            for member, work in works:  # noqa: B007  # an error names it
                work.wait(self._timeout)
        except RuntimeError as error:
            lost = f"member {member} of {self.size} of this unit is lost: {first_line(error)}"
            raise InstanceLost(lost) from error


def _split(x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Returns consecutive rows of x, as views."""
    ends = list(accumulate(sizes))
    return [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Returns [num_rows, num_columns] of any dtype as [num_rows, bytes of a row]."""
    return x.contiguous().view(torch.uint8)


def _columns_of(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parts of rows of bytes, each in its own dtype."""
    found, start = [], 0
    for each in like:
        part = torch.empty(len(joined), each.shape[1], dtype=each.dtype)
        stop = start + each.shape[1] * each.element_size()
        part.view(torch.uint8).copy_(joined[:, start:stop])
        found.append(part)
        start = stop
    return found
