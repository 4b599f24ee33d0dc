"""The types of a fault, of the tools that its script uses, and of its observations."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.faulted_cluster import FaultedCluster
from pd_cluster.result_tables import Result


@dataclass(frozen=True, slots=True)
class FaultObservations:
    """A script's measurements. `back_s`: when service returned after an outage, on the monotonic clock."""

    detected_s: list[float] = field(default_factory=list)  # times from each signal until /instances shows the loss
    served_s: list[float] = field(
        default_factory=list
    )  # time from the start of the new scheduler's process until its first answer
    back_s: float | None = None
    figures: list[Result] = field(default_factory=list)  # only this fault's; names without its key


@dataclass(frozen=True, slots=True)
class FaultContext:
    """The tools of a script. `probe` is a request that is answered quickly.

    `scale` is the factor by which a script's counts are reduced.
    """

    stage: FaultedCluster
    stall_s: float
    probe: dict[str, Any]
    scale: float = 1.0
    rng: random.Random = field(default_factory=random.Random)

    def count(self, most: int) -> int:
        return max(1, round(self.scale * most))


@dataclass(frozen=True, slots=True)
class Fault:
    """`goal_s`: the time within which the loss must be detected; None if nothing is lost."""

    title: str
    script: Callable[[FaultContext], Awaitable[FaultObservations]]
    goal_s: float | None = None
