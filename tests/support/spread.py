"""Rows of parametrized tests whose code branches on each value alone: not every combination is another path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def spread(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns as many rows as the longest list has values: each value of each list is in one, at least.

    Tuples among the values are several columns.
    """
    rows = [[each[at % len(each)] for each in values] for at in range(max(map(len, values)))]
    return [tuple(part for each in row for part in (each if isinstance(each, tuple) else (each,))) for row in rows]
