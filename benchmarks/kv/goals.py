"""Judges the results of `benchmarks kv`: a handover's rate as a share of the same round's baseline, and the goals.

Pure: rounds in, goals and results out. A round is figures by name: GB/s of `shm on 16 MiB`, `memcpy 16 MiB`, …;
names in `_ms` or `_s` are times, names in `_share` shares of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.goals import Goal, lowest_median_highest, ratios
from pd_cluster.tables import Report, Result, percentile, print_table, spread
from pd_cluster.transport.table import BY_NAME
from pd_cluster.wire import TransportName

Round = Mapping[str, float]

SHARES: dict[TransportName, tuple[float, float]] = {
    "shm": (0.85, 0.60),
    "dist": (0.90, 0.80),
    "curve": (0.20, 0.20),
    "nixl": (0.85, 0.60),
}  # off, on
LEAST_MIB = 16  # smaller transfers have no goal
BLOCK_MS = 1.0
STREAMING_PERCENT = 15.0
BALANCE = 0.1  # the largest relative difference between computation and transfer
UNITS = {"_ms": "ms", "_s": "s", "_share": "x"}


@dataclass(frozen=True, slots=True)
class KVReport(Report):
    goals: list[Goal]

    def to_json(self) -> dict[str, Any]:
        return {**Report.to_json(self), "goals": [goal.to_json() for goal in self.goals]}


def baseline_of(transport: TransportName) -> str:
    """Returns the copy that a transport is compared with: within this process's memory, plain UCX or gloo."""
    if transport == "nixl":
        return "ucx"
    return "memcpy" if BY_NAME[transport].is_same_host else "gloo"


def figure(what: str, size_mib: int) -> str:
    return f"{what} {size_mib} MiB"


def shares(rounds: Sequence[Round], what: str, baseline: str, size_mib: int) -> list[float]:
    """Returns the shares of the rounds that have both."""
    pairs = [(each.get(figure(what, size_mib)), each.get(figure(baseline, size_mib))) for each in rounds]
    return ratios([above for above, _ in pairs], [below for _, below in pairs])


def handover_goals(
    rounds: Sequence[Round], transports: Sequence[TransportName], sizes_mib: Sequence[int]
) -> list[Goal]:
    """Returns the goals of those transports that have `SHARES`."""
    goals = []
    for transport in [name for name in transports if name in SHARES]:
        for checks, goal in zip(("off", "on"), SHARES[transport], strict=True):
            for size_mib in [size for size in sizes_mib if size >= LEAST_MIB]:
                baseline = baseline_of(transport)
                name = f"{transport}, checks {checks}, {size_mib} MiB: share of {baseline}"
                values = shares(rounds, f"{transport} {checks}", baseline, size_mib)
                goals.append(Goal(name=name, goal=goal, better="higher", values=values))
    return goals


def other_goals(rounds: Sequence[Round]) -> list[Goal]:
    """Returns the goals that were measured."""
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
    """Returns a slow link's delay between token one and token two; 1 is the delay without streaming."""
    return (throttled_gap_s - free_gap_s) / transfer_s


def is_balanced(compute_s: float, transfer_s: float) -> bool:
    """Returns whether a computation took as long as the transfer, so that the delay is due to streaming."""
    return abs(compute_s / transfer_s - 1) <= BALANCE


def results(rounds: Sequence[Round]) -> list[Result]:
    """Returns every figure, in the order in which they were first measured."""
    found: dict[str, list[float]] = {}
    for each in rounds:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return [_result(name, values) for name, values in found.items()]


def latencies(what: str, ships_s: Sequence[float], confirms_s: Sequence[float], landings_s: Sequence[float]) -> Round:
    """Returns median and p95 of one block from its ship to its confirmation, and of the way to the receiver alone."""
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
