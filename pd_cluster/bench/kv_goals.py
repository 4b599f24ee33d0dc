"""Judges what `bench kv` measured: a handover's rate as a share of the baseline's of the same round, and the goals.

Pure: rounds in, goals and results out. A round is figures by name: GB/s of `shm on 16 MiB`, `memcpy 16 MiB`, …;
what ends with `_ms` or `_s` is a time, with `_share` a share of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_cluster.bench.engine_goals import Goal, lowest_median_highest, ratios
from pd_cluster.bench.report import Report, Result, percentile, print_table, spread
from pd_cluster.wire import TransportName

Round = Mapping[str, float]

BASELINES: dict[TransportName, str] = {"shm": "memcpy", "dist": "gloo"}
SHARES: dict[TransportName, tuple[float, float]] = {"shm": (0.85, 0.60), "dist": (0.90, 0.80)}  # off, on
LEAST_MIB = 16  # smaller transfers have no goal
BLOCK_MS = 1.0
STREAMING_PERCENT = 15.0
BALANCE = 0.1  # computation and transfer may differ by that much
UNITS = {"_ms": "ms", "_s": "s", "_share": "x"}


@dataclass(frozen=True, slots=True)
class KVReport(Report):
    goals: list[Goal]

    def to_json(self) -> dict[str, Any]:
        return {**Report.to_json(self), "goals": [goal.to_json() for goal in self.goals]}


def figure(what: str, size_mib: int) -> str:
    return f"{what} {size_mib} MiB"


def shares(rounds: Sequence[Round], what: str, baseline: str, size_mib: int) -> list[float]:
    """Of the rounds that have both."""
    pairs = [(each.get(figure(what, size_mib)), each.get(figure(baseline, size_mib))) for each in rounds]
    return ratios([above for above, _ in pairs], [below for _, below in pairs])


def handover_goals(
    rounds: Sequence[Round], transports: Sequence[TransportName], sizes_mib: Sequence[int]
) -> list[Goal]:
    goals = []
    for transport in transports:
        for checks, goal in zip(("off", "on"), SHARES[transport], strict=True):
            for size_mib in [size for size in sizes_mib if size >= LEAST_MIB]:
                baseline = BASELINES[transport]
                name = f"{transport}, checks {checks}, {size_mib} MiB: share of {baseline}"
                values = shares(rounds, f"{transport} {checks}", baseline, size_mib)
                goals.append(Goal(name=name, goal=goal, better="higher", values=values))
    return goals


def other_goals(rounds: Sequence[Round]) -> list[Goal]:
    """As far as they were measured."""
    goals = []
    if block_ms := [each["block shm on_ms"] for each in rounds if "block shm on_ms" in each]:
        goals.append(
            Goal(name="one block over shm, confirmed", goal=BLOCK_MS, better="lower", unit="ms", values=block_ms)
        )
    if any("token one, slow link_s" in each for each in rounds):
        late = [100 * each["late_share"] for each in rounds if "late_share" in each]
        goals.append(
            Goal(
                name="token two late, % of the KV's transfer time",
                goal=STREAMING_PERCENT,
                better="lower",
                unit="%",
                values=late,
                missing="" if late else "the machine's speed changed too much: no computation took as long as the link",
            )
        )
    return goals


def late_share(throttled_gap_s: float, free_gap_s: float, transfer_s: float) -> float:
    """What a slow link costs between token one and token two; 1 is what it would without streaming."""
    return (throttled_gap_s - free_gap_s) / transfer_s


def is_balanced(compute_s: float, transfer_s: float) -> bool:
    """Whether a computation took as long as the transfer, so that what is late is streaming's doing."""
    return abs(compute_s / transfer_s - 1) <= BALANCE


def results(rounds: Sequence[Round]) -> list[Result]:
    """Every figure, in the order in which they were first measured."""
    found: dict[str, list[float]] = {}
    for each in rounds:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return [_result(name, values) for name, values in found.items()]


def latencies(what: str, ships_s: Sequence[float], confirms_s: Sequence[float], landings_s: Sequence[float]) -> Round:
    """Median and p95 of one block from its ship to its confirmation, and of the way to the receiver alone."""
    there_ms = [1e3 * (end - start) for start, end in zip(ships_s, landings_s, strict=True)]
    both_ms = [1e3 * (end - start) for start, end in zip(ships_s, confirms_s, strict=True)]
    return {
        f"block {what}_ms": percentile(both_ms, 50) or 0.0,
        f"block {what} p95_ms": percentile(both_ms, 95) or 0.0,
        f"block {what} one way_ms": percentile(there_ms, 50) or 0.0,
    }


def show(report: KVReport, title: str) -> None:
    report.show(title)
    if report.goals:
        numbers = ("min", "median", "max")
        print_table("goals", ["", "goal", *numbers, "met"], [goal.row() for goal in report.goals], right=numbers)


def _result(name: str, values: list[float]) -> Result:
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "GB/s")
    return Result(
        name=name,
        value=lowest_median_highest(values)[1],
        unit=unit,
        better="higher" if unit == "GB/s" else "lower",
        samples=len(values),
        spread=spread(values),
    )
