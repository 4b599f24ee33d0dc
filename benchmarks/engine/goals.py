"""Judges the results of `benchmarks engine`: ratios of one round's figures, and whether the goals are met.

Pure: rounds in, goals out. A ratio compares runs of the same round; an engine that ran a workload only in the first
round is represented by that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.spec import PeerResult, Run
from pd_cluster.tables import Better

OURS, REFERENCE, FLOORS, STEPS, GUIDED = "ours", "generate", "floors", "steps", "guided"
PARTS = {"steps": (FLOORS, STEPS), "guided": (GUIDED,), "ranks": ("ranks",)}  # engines that profile steps, by workload
Round = Mapping[str, PeerResult]  # results of one round, by engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal, and its value in each round.

    The median must meet it; it is never met while a compared engine is missing.
    """

    name: str
    goal: float
    better: Better
    unit: str = "x"
    values: list[float]
    missing: str = ""  # why it cannot be judged: an absent or failed engine, and the remedy

    @property
    def met(self) -> bool:
        if self.missing or not self.values:
            return False
        reached = median(self.values)
        return reached >= self.goal if self.better == "higher" else reached <= self.goal

    def to_json(self) -> dict[str, Any]:
        low, middle, high = lowest_median_highest(self.values)
        return {
            "name": self.name,
            "goal": self.goal,
            "better": self.better,
            "unit": self.unit,
            "min": low,
            "median": middle,
            "max": high,
            "samples": len(self.values),
            "met": self.met,
            "missing": self.missing or None,
        }

    def row(self) -> list[str]:
        """name, goal, min, median, max, met."""
        sign = "≥" if self.better == "higher" else "≤"
        unit = "" if self.unit == "x" else f" {self.unit}"
        reached = ["-" if value is None else f"{value:.3g}" for value in lowest_median_highest(self.values)]
        met = "yes" if self.met else f"NO: {self.missing}" if self.missing else "NO"
        return [self.name, f"{sign} {self.goal:g}{unit or ' x'}", *reached, met]


def lowest_median_highest(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Returns None for each if there are no values; otherwise rounds them to five digits."""
    if not values:
        return None, None, None
    low, middle, high = (float(f"{value:.5g}") for value in (min(values), median(values), max(values)))
    return low, middle, high


# ---- throughput


def tokens_per_s(rounds: Sequence[Round], engine: str, workload: str) -> list[float | None]:
    """Returns output tokens per second, by round; a round without a run gets the value of the latest one before."""
    found: list[float | None] = []
    for each in rounds:
        run = each[engine].runs.get(workload) if engine in each else None
        latest = found[-1] if found else None
        found.append(sum(map(len, run.outputs)) / run.took_s if run else latest)
    return found


def throughput_goals(rounds: Sequence[Round], others: Sequence[str], missing: Mapping[str, str]) -> list[Goal]:
    """`others` are the engines, besides generate(), among which the best is sought; `missing`: engine -> why."""
    goals = []
    for workload, goal in (("uniform", 2.0), ("mixed", 3.0)):
        if not ran(rounds, workload):
            continue
        ours = tokens_per_s(rounds, OURS, workload)
        reference = tokens_per_s(rounds, REFERENCE, workload)
        goals.append(
            Goal(
                name=f"{workload}: tokens/s, times generate()",
                goal=goal,
                better="higher",
                values=ratios(ours, reference),
                missing=missing.get(REFERENCE, ""),
            )
        )
    if ran(rounds, "uniform"):
        peers = [tokens_per_s(rounds, other, "uniform") for other in others]
        best = [max((value for value in each if value), default=None) for each in zip(*peers, strict=True)]
        goals.append(
            Goal(
                name="uniform: tokens/s, times the best other",
                goal=1.2,
                better="higher",
                values=ratios(tokens_per_s(rounds, OURS, "uniform"), best),
                missing="; ".join(missing[other] for other in others if other in missing)
                or ("" if others else "no other engine was asked for"),
            )
        )
    return goals


def ran(rounds: Sequence[Round], workload: str) -> bool:
    return any(OURS in each and workload in each[OURS].runs for each in rounds)


def ratios(above: Sequence[float | None], below: Sequence[float | None]) -> list[float]:
    """Returns the ratios of the rounds that have both."""
    return [a / b for a, b in zip(above, below, strict=False) if a is not None and b]


# ---- steps

Figures = Mapping[str, float]
STEP_GOALS: list[tuple[str, float, str, Callable[[Figures], float]]] = [
    ("decode of 1, times reading the weights", 1.4, "x", lambda f: f["decode_1_ms"] / f["read_weights_ms"]),
    ("decode of 32, times its linears alone", 1.25, "x", lambda f: f["decode_32_ms"] / linears_ms(f, 32)),
    ("1,024-token prefill, times its linears", 1.25, "x", lambda f: f["prefill_1024_ms"] / linears_ms(f, 1024)),
    ("bookkeeping of a step of 32", 0.5, "ms", lambda f: f["bookkeeping_32_ms"]),
    ("greedy sampling of 32", 3.0, "ms", lambda f: f["greedy_32_ms"]),
    ("top-k/top-p sampling of 32, % of the step", 10.0, "%", lambda f: 100 * f["drawn_32_ms"] / f["drawn_step_32_ms"]),
    ("TTFT of 64 after a cached prefix, times alone", 1.2, "x", lambda f: f["prefix_ttft_ms"] / f["alone_ttft_ms"]),
]


def linears_ms(figures: Figures, num_rows: int) -> float:
    """Returns the faster kind's milliseconds."""
    return min(figures[f"linears_{num_rows}_{kind}_ms"] for kind in ("stock", "packed"))


def step_goals(rounds: Sequence[Round]) -> list[Goal]:
    figures = [{**each[FLOORS].figures, **each[STEPS].figures} for each in rounds if STEPS in each and FLOORS in each]
    if not figures:
        return []
    return [
        Goal(name=name, goal=goal, better="lower", unit=unit, values=[value_of(each) for each in figures])
        for name, goal, unit, value_of in STEP_GOALS
    ]


def guided_goals(rounds: Sequence[Round]) -> list[Goal]:
    """Judges a guide's extra cost per step, against the same step without one."""
    figures = [each[GUIDED].figures for each in rounds if GUIDED in each]
    goals = []
    for name in ("greedy", "drawn") if figures else ():
        values = [100 * (each[f"guided_{name}_16_over_unguided"] - 1) for each in figures]
        goals.append(
            Goal(
                name=f"guided decode of 16, {name}: more than unguided",
                goal=10.0,
                better="lower",
                unit="%",
                values=values,
            )
        )
    return goals


# ---- tokens


def equal_tokens(run: Run, reference: Run) -> tuple[float, float]:
    """Returns the shares of all tokens, and of the first tokens, that equal the reference's."""
    pairs = list(zip(run.outputs, reference.outputs, strict=True))
    num_equal = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
    num_first = sum(ours[:1] == theirs[:1] for ours, theirs in pairs)
    return num_equal / max(1, sum(len(theirs) for _, theirs in pairs)), num_first / max(1, len(pairs))
