"""The final report of `benchmarks soak`: shares, worst times, and growth of memory and descriptors.

Pure: takes answers and samples, and returns figures and lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import linear_regression
from typing import NamedTuple

from benchmarks.faults.faults_report import COMPLETE_GOAL, Tokens, first_difference, share
from benchmarks.faults.resource_use import NOTHING, ResourceUse
from benchmarks.mixed_load import Answer
from pd_cluster.result_tables import Result, counted

WARM_SHARE = 1 / 3  # share of a process's samples that is left out, while caches and heaps fill
FEWEST_SAMPLES = 6  # minimum number of samples for a slope
MOST_SHOWN = 20
HOUR_S = 3600.0
LEFT = "its client left"  # the error of a request whose client left on purpose


class Use(NamedTuple):
    """One process's resources at one time of the monotonic clock. Memory is anonymous memory, without the pool."""

    at_s: float
    memory_mib: float
    num_descriptors: int


class Tally:
    """Compares answers with the right tokens as they arrive, and keeps only answers that differ."""

    def __init__(self, expected: Sequence[Tokens]) -> None:
        self.num_answers = self.num_complete = self.num_exact = self.num_refused = self.num_left = 0
        self.worst_gap_s = self.worst_wait_s = 0.0
        self.lines: list[str] = []
        self._expected = expected

    def take(self, answer: Answer) -> None:
        sample = answer.sample
        if sample.error == LEFT:
            self.num_left += 1
            return
        self.num_answers += 1
        if answer.is_refused:
            self.num_refused += 1
            return
        where = f"request {answer.number} ({' and '.join(sample.served_by) or 'nobody'})"
        if not answer.is_complete:
            self._note(f"{where} failed after {len(sample.token_ids)} tokens: {sample.error}")
            return
        self.num_complete += 1
        self.worst_gap_s = max(self.worst_gap_s, *sample.itl_s, 0.0)
        self.worst_wait_s = max(self.worst_wait_s, sample.ttft_s or 0.0)
        expected = self._expected[answer.number % len(self._expected)]
        if sample.token_ids == expected:
            self.num_exact += 1
        else:
            self._note(f"{where} differs from token {first_difference(expected, sample.token_ids)} on")

    def _note(self, line: str) -> None:
        if len(self.lines) < MOST_SHOWN:
            self.lines.append(line)

    def results(self) -> list[Result]:
        return [
            share("complete", self.num_complete, self.num_answers - self.num_refused, COMPLETE_GOAL),
            share("exact", self.num_exact, self.num_complete, 100.0),
            counted("requests", self.num_answers, "requests"),
            counted("refused", self.num_refused, "requests"),
            counted("left by their clients", self.num_left, "requests"),
            counted("worst gap", self.worst_gap_s, "s"),
            counted("worst wait", self.worst_wait_s, "s"),
        ]


class Watch:
    """Samples of each process over time, which the caller takes."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, str], list[Use]] = {}
        self._last: set[tuple[int, str]] = set()

    def note(self, uses: Mapping[tuple[int, str], Use]) -> None:
        for process, use in uses.items():
            self._samples.setdefault(process, []).append(use)
        self._last = set(uses)

    def by_minute(self) -> Iterator[str]:
        """Yields a line for each living process: its memory in MiB, minute by minute."""
        for process in sorted(self._last, key=lambda process: process[1]):
            samples = self._samples[process]
            told, next_s = [], samples[0].at_s
            for use in samples:
                if use.at_s >= next_s:
                    told.append(f"{use.memory_mib:.0f}")
                    next_s = use.at_s + 59.0
            yield f"{process[1]}, MiB by minute: {' '.join(told)}"

    def results(self) -> list[Result]:
        """Returns an hourly slope for each living process with enough samples, without its warm-up."""
        found = []
        for process in sorted(self._last, key=lambda process: process[1]):
            samples = self._samples[process]
            warm = samples[int(len(samples) * WARM_SHARE) :]
            if len(warm) >= FEWEST_SAMPLES:
                for name, unit, value_of in SERIES:
                    slope = slope_per_hour(warm, value_of)
                    found.append(counted(f"{process[1]} {name}", value_of(samples[-1]), unit))
                    per_hour = counted(f"{process[1]} {name} slope", slope, f"{unit}/h")
                    found.append(replace(per_hour, samples=len(warm)))
        return found


SERIES: tuple[tuple[str, str, Callable[[Use], float]], ...] = (
    ("memory", "MiB", lambda use: use.memory_mib),
    ("descriptors", "descriptors", lambda use: use.num_descriptors),
)


@dataclass(frozen=True, slots=True)
class Soak:
    """The result of one soak. `faults` counts each fault that was drawn."""

    took_s: float
    tally: Tally
    watch: Watch
    faults: Counter[str] = field(default_factory=Counter)
    num_replayed: int = 0
    num_held: int = 0
    left: ResourceUse = NOTHING

    def results(self) -> list[Result]:
        return [
            *self.tally.results(),
            Result(name="duration", value=self.took_s / 60, unit="min", better="higher"),
            counted("faults", self.faults.total(), "faults"),
            *(counted(f"fault {name}", number, "faults") for name, number in sorted(self.faults.items())),
            counted("replayed", self.num_replayed, "requests"),
            counted("held", self.num_held, "blocks", 0),
            *self.left.results(),
            *self.watch.results(),
        ]

    @property
    def is_right(self) -> bool:
        """Whether all goals that do not depend on the machine's speed were met."""
        return all(result.met is not False for result in self.results())


def slope_per_hour(samples: Sequence[Use], value_of: Callable[[Use], float]) -> float:
    """Fits a line to two or more samples at different times; returns its slope per hour."""
    return HOUR_S * linear_regression([use.at_s for use in samples], [*map(value_of, samples)]).slope
