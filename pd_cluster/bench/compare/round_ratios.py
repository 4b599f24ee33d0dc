"""The figures of a comparison: medians over rounds, and ratios to the first server within each round.

A slow period of the machine affects all runs in it, so the ratio of two runs of one round varies less than either run.
Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from pd_cluster.bench.load_report import LoadRun, results_of
from pd_cluster.result_tables import Better, Result, counted, spread

SLOW = 1.1  # multiple of the median of constant work above which a run counts as slowed by the machine
NUM_RESAMPLES = 2000
LEAST_RESAMPLED = 6  # rounds; with fewer, the range is lowest to highest
SHOWN = ("ttft_p50", "ttft_p90", "tpot_p50", "itl_p99", "output_tokens", "goodput", "slo_met", "errors")
OWN = ("cores", "idle_cores")  # figures of the server's CPU use, under load and when idle


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One server's load at one level in one round."""

    server: str
    round_: int
    level: float
    load: LoadRun
    constant_s: float  # duration of constant work, the mean of before and after
    cores: float | None = None  # CPU seconds a second; None for a server given by its address
    idle_cores: float | None = None

    def figures(self) -> dict[str, Result]:
        found = {each.name: each for each in results_of(self.load) if each.name in SHOWN}
        for name in OWN:
            value = getattr(self, name)
            found[name] = Result(name=name, value=value, unit="cores", better="lower")
        return found


@dataclass(frozen=True, slots=True)
class MedianRange:
    """The median over rounds, with a bootstrapped 95 % range or, for few rounds, the lowest and highest values."""

    middle: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MedianRange | None:
        if not values:
            return None
        low, high = min(values), max(values)
        if len(values) >= LEAST_RESAMPLED:
            rng = random.Random(0)
            drawn = sorted(median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
            low, high = drawn[round(0.025 * NUM_RESAMPLES)], drawn[round(0.975 * NUM_RESAMPLES) - 1]
        return cls(median(values), low, high, len(values))


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one server at one level, over the rounds. `ratio`: to the first server, if defined."""

    server: str
    level: float
    name: str
    unit: str
    better: Better
    value: MedianRange | None
    ratio: MedianRange | None


def order_of(servers: Sequence[str], round_: int) -> list[str]:
    """Returns the order of a round: A B C, then C B A, so that no server always gets the warmer or quieter machine."""
    return list(servers) if round_ % 2 == 0 else list(reversed(servers))


def compared(runs: Sequence[ComparedRun]) -> list[Compared]:
    """Returns every figure of every server at every level. The first run's server is the reference."""
    figures = {(run.server, run.level, run.round_): run.figures() for run in runs}
    first = runs[0].server
    found = []
    for server, level in dict.fromkeys((run.server, run.level) for run in runs):
        rounds = [run.round_ for run in runs if (run.server, run.level) == (server, level)]
        for name in (*SHOWN, *OWN):
            own = {at: figures[server, level, at].get(name) for at in rounds}
            base = {at: figures.get((first, level, at), {}).get(name) for at in rounds}
            known = [each for each in own.values() if each is not None]
            if not known:
                continue
            ratios = [one / two for one, two in _pairs(own, base)] if server != first else []
            values = [each.value for each in known if each.value is not None]
            found.append(
                Compared(
                    server, level, name, known[0].unit, known[0].better, MedianRange.of(values), MedianRange.of(ratios)
                )
            )
    return found


def _pairs(own: dict[int, Result | None], base: dict[int, Result | None]) -> Iterator[tuple[float, float]]:
    """Yields both values of each round that has both, if the divisor is above 0."""
    for at, result in own.items():
        other = base[at]
        if result is not None and other is not None and result.value is not None and other.value:
            yield result.value, other.value


def slow_runs(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Returns the runs whose constant work took longer than usual."""
    usual = median(run.constant_s for run in runs)
    return [run for run in runs if run.constant_s > SLOW * usual]


def results(runs: Sequence[ComparedRun]) -> Iterator[Result]:
    """Yields medians of values and ratios, and constant work."""
    first = runs[0].server
    has_levels = len({run.level for run in runs}) > 1
    for each in compared(runs):
        at = f", load {each.level:g}" if has_levels else ""
        given = ((each.server, each.unit, each.value), (f"{each.server} / {first}", "x", each.ratio))
        for name, unit, span in given:
            if span is not None:
                full = f"{name}{at}: {each.name}"
                yield Result(name=full, value=span.middle, unit=unit, better=each.better, samples=span.num)
    taken = [run.constant_s for run in runs]
    steadiness = spread(taken)
    yield Result(
        name="constant work", value=median(taken), unit="s", better="lower", samples=len(taken), spread=steadiness
    )
    yield counted("runs while the machine was slow", len(slow_runs(runs)), "runs")
