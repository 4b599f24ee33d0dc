"""Parameters for tests of code that branches on each value separately, so that not every combination is needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def spread(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns as many rows as the longest list has values; each value of each list is in at least one row.

    A tuple among the values fills several columns.
    """
    rows = [[each[at % len(each)] for each in values] for at in range(max(map(len, values)))]
    return [tuple(part for each in row for part in (each if isinstance(each, tuple) else (each,))) for row in rows]


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns rows in which any two values of two lists occur together: a third to a tenth of all combinations.

    Greedily takes the row with the most missing pairs; returns the same rows in each run.
    """
    rows = list(itertools.product(*values))

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    missing, found = set().union(*map(pairs, rows)), []
    while missing:
        found.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(found[-1])
    return found
