"""Places in steps: how many sequences take part, and how many of them are further ones of a request. Integers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pd_cluster.types import Request, Status

KEPT_SHARE = 8  # of so many places, one is kept for requests that begin


class SequenceLimit:
    """A request of a hundred sequences takes no place that a request needs to begin.

    Further sequences of requests (from the second on, beams too) have all places but an eighth, and come after requests
    that begin until these have that eighth.
    """

    def __init__(self, most: int, requests: Mapping[str, Request]) -> None:
        """`requests`: the scheduler's own."""
        self.most = most
        self._num_kept = max(1, most // KEPT_SHARE)
        self._most_further = max(1, most - self._num_kept)
        self._requests = requests

    @property
    def num_taken(self) -> int:
        """Counts sequences that take part in steps, or will once their KV has landed."""
        return sum(1 for r in self._requests.values() if r.status in (Status.RUNNING, Status.LANDING))

    @property
    def num_further(self) -> int:
        """Counts those of `num_taken` that are further ones."""
        return sum(1 for r in self._requests.values() if r.index and r.status in (Status.RUNNING, Status.LANDING))

    @property
    def num_free_for_further(self) -> int:
        return max(0, min(self.most - self.num_taken, self._most_further - self.num_further))

    @property
    def num_free_for_group(self) -> int:
        """Counts places for sequences that begin together, with the first of their request."""
        return max(0, min(self.most - self.num_taken, self._most_further - self.num_further + 1))

    def next(self, waiting: Sequence[Request], at: int = 0) -> int:
        """Returns the index of the first, from `at` on, whose place may be free; their number if there is none."""
        if at < len(waiting) and waiting[at].index and self.num_further >= self._most_further:
            return next((each for each in range(at, len(waiting)) if not waiting[each].index), len(waiting))
        return at

    def may_land(self, request: Request, waiting: Sequence[Request]) -> bool:
        """Whether a request has a place that none of those that wait comes first for."""
        num_taken = self.num_taken
        if num_taken >= self.most:
            return False
        if not waiting or waiting[0].priority > request.priority:
            return True
        num_further = self.num_further
        if num_further < self._most_further and num_taken - num_further >= self._num_kept:
            return False
        first = next((each for each in waiting if not each.index), None)
        return first is None or first.priority > request.priority
