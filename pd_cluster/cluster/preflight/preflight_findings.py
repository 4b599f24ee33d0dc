"""Formats and orders the findings of the pre-flight checks: one line each, worst first; equal findings are joined.

Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

Level = Literal["error", "unchecked", "warning", "ok"]
LEVELS: tuple[Level, ...] = get_args(Level)  # the worst first


@dataclass(frozen=True, slots=True)
class Finding:
    """`where`: a card, or a pair of instances. `way_out`: the remedy, or ""."""

    level: Level
    what: str
    where: str
    text: str
    way_out: str = ""
    rate: float = 0.0  # GB/s; orders findings that are equally bad

    @property
    def line(self) -> str:
        said = f"{self.what}: {self.where}: {self.text}"
        return f"{said}; {self.way_out}" if self.way_out else said


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Joins findings that differ only in their place, and returns them worst first.

    Equally bad ones are ordered by rate, then by arrival.
    """
    joined: dict[Finding, list[str]] = {}
    for each in findings:
        places = joined.setdefault(replace(each, where=""), [])
        if each.where not in places:
            places.append(each.where)
    found = [replace(each, where=", ".join(places)) for each, places in joined.items()]
    return sorted(found, key=lambda each: (LEVELS.index(each.level), each.rate))


def is_wrong(findings: Iterable[Finding]) -> bool:
    return any(each.level == "error" for each in findings)
