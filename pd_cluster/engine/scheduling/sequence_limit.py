"""Limits the sequences of a step, and how many of them are further sequences of a request. Uses only integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pd_cluster.types import Request, Status

RESERVED_SHARE = 8  # one in this many places is reserved for the first sequences of requests


class SequenceLimit:
    """A request with a hundred sequences must not take the places that other requests need to begin.

    Further sequences of requests (the second and later ones, and beams) may take all places except an eighth. As long
    as first sequences have not taken this eighth, they come before further ones.
    """

    def __init__(self, most: int, requests: Mapping[str, Request]) -> None:
        """`requests`: the scheduler's own table."""
        self.most = most
        self._num_kept = max(1, most // RESERVED_SHARE)
        self._most_further = max(1, most - self._num_kept)
        self._requests = requests

    @property
    def num_taken(self) -> int:
        """Counts sequences that take part in steps or will do so once their KV has landed."""
        takers = (r for r in self._requests.values() if r.status in (Status.RUNNING, Status.LANDING))
        return sum(1 for r in takers if not r.is_pull)

    @property
    def num_further(self) -> int:
        """Counts the places that further sequences have taken."""
        return sum(1 for r in self._requests.values() if r.index and r.status in (Status.RUNNING, Status.LANDING))

    @property
    def num_free_for_further(self) -> int:
        return max(0, min(self.most - self.num_taken, self._most_further - self.num_further))

    @property
    def num_free_for_group(self) -> int:
        """Counts the free places for sequences that begin together, including the first sequence of their request."""
        return max(0, min(self.most - self.num_taken, self._most_further - self.num_further + 1))

    def next(self, waiting: Sequence[Request], at: int = 0) -> int:
        """Returns the index, from `at` on, of the first request that may take a place; the list's length if none."""
        if at < len(waiting) and waiting[at].index and self.num_further >= self._most_further:
            return next((each for each in range(at, len(waiting)) if not waiting[each].index), len(waiting))
        return at

    def may_land(self, request: Request, waiting: Sequence[Request]) -> bool:
        """Whether there is a place for a landing request, besides the places for waiting requests that come first."""
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
