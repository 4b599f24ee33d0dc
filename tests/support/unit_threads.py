"""A unit of instances in the test's process: each instance is a thread, and rows are exchanged at a barrier."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.types import Request, TokenOutput
from tests.support.ranks import ranks

WAIT_S = 60.0
Tokens = dict[str, list[TokenOutput]]


class Hall:
    """Lets `size` threads exchange values at a barrier."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size, timeout=WAIT_S), [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        """Makes the other threads' waits fail."""
        self._barrier.abort()


class ThreadUnit:
    """One member's end. `nums_rows`: each member's number of rows in the last exchange."""

    def __init__(self, hall: Hall, rank: int) -> None:
        self._hall, self._rank = hall, rank
        self.rows: Sequence[int] | None = None
        self.nums_rows: list[int] = []
        self.is_formed = False

    def form(self) -> None:
        assert not self.is_formed
        self._hall.swap(self._rank, None)
        self.is_formed = True

    def gather(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.is_formed
        assert (chosen.dtype, weights.dtype) == (torch.int64, torch.float32)
        parts = self._hall.swap(self._rank, (x, chosen, weights))
        self.nums_rows = [len(rows) for rows, _, _ in parts]
        xs, numbers, factors = zip(*parts, strict=True)
        return torch.cat(xs), torch.cat(numbers), torch.cat(factors)

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        assert len(partials) == sum(self.nums_rows)
        first = sum(self.nums_rows[: self._rank])
        own = slice(first, first + self.nums_rows[self._rank])
        parts = [each[own] for each in self._hall.swap(self._rank, partials)]
        total = parts[0].clone()
        for member in self.order()[1:]:
            total += parts[member]
        return total

    def order(self) -> list[int]:
        return list(range(len(self.nums_rows)))


@contextlib.contextmanager
def unit(
    folder: Path, size: int, tp_size: int = 1, kind: Callable[[Hall, int], Any] = ThreadUnit, **settings: Any
) -> Iterator[list[EngineCore]]:
    """Yields the members' cores; each must be stepped in its own thread.

    `kind` makes an end of the exchange for member `rank`; ends with the same hall exchange rows.
    """
    halls = [Hall(size) for _ in range(tp_size)]

    def member(rank: int) -> EngineCore:
        place: dict[str, Any] = {"data_parallel_size": size, "unit_rank": rank}
        try:
            ends = [kind(hall, rank) for hall in halls]
            return members.enter_context(ranks(folder, tp_size, units=ends, **{**settings, **place}))
        except BaseException:
            for hall in halls:
                hall.leave()
            raise

    with contextlib.ExitStack() as members, ThreadPoolExecutor(size) as threads:
        yield [each.result(WAIT_S) for each in [threads.submit(member, rank) for rank in range(size)]]


def run_in_step(cores: Sequence[EngineCore], requests: Sequence[Sequence[Request]]) -> list[Tokens]:
    """Runs each member's requests in rounds that all members enter, even those without requests."""
    hall, found = Hall(len(cores)), [Tokens() for _ in cores]

    def rounds(rank: int) -> None:
        torch.set_num_threads(1)
        core = cores[rank]
        for request in requests[rank]:
            core.scheduler.add(request)
        try:
            while any(hall.swap(rank, bool(core.scheduler.requests))):
                if core.scheduler.requests:
                    for _, token in core.step().sampled:
                        found[rank].setdefault(token.request_id, []).append(token)
                else:
                    core.runner.take_part()  # type: ignore[attr-defined]
        except BaseException:
            hall.leave()
            raise

    with ThreadPoolExecutor(len(cores)) as threads:
        for each in [threads.submit(rounds, rank) for rank in range(len(cores))]:
            each.result(WAIT_S)
    return found
