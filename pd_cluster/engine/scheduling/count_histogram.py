"""Counts integers in buckets. Adding one takes a binary search among about a dozen bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pd_cluster import wire


class CountHistogram:
    """Counts that only grow. A number belongs to the first bucket whose bound is not below it."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0

    def add(self, number: int) -> None:
        self._counts[bisect_left(self._bounds, number)] += 1
        self._total += number

    def tally(self) -> wire.Tally:
        return wire.Tally(tuple(self._counts), self._total)
