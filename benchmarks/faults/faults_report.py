"""The report of `benchmarks faults` on each run: shares of complete and exact answers, times, replays, blocks.

Pure: takes answers, and returns figures and lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.faults.fault_scripts import SERVED_GOAL_S
from benchmarks.faults.fault_types import Fault, FaultObservations
from benchmarks.faults.resource_use import NOTHING, ResourceUse
from benchmarks.figures import result
from benchmarks.mixed_load import Answer
from pd_cluster.result_tables import Result, counted, print_table

Tokens = tuple[int, ...]

COMPLETE_GOAL = 99.9  # percent
MAX_SHOWN = 10
COLUMNS = ("requests", "complete", "exact", "replayed", "seen after", "served after", "worst gap", "worst wait", "held")


LEGEND = """complete: share of the requests. exact: share of these with the tokens of the run without faults.
seen after: from the signal until /instances shows the loss. served after: from the new scheduler's start to an answer.
worst gap: longest time between two events of a stream. worst wait: longest time to a first token.
held: blocks at the end.
Each run also counts processes, descriptors, files in /dev/shm and memory: at its end, minus before it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the requests. `expected`: each request's tokens in the fault-free run; empty for that run itself."""

    key: str
    title: str
    answers: Sequence[Answer]
    expected: Sequence[Tokens] = ()
    fault: Fault | None = None
    seen: FaultObservations = field(default_factory=FaultObservations)
    num_replayed: int = 0
    num_held: int = 0
    left: ResourceUse = NOTHING

    @property
    def apart(self) -> list[Answer]:
        """Failed requests that were lost only because their scheduler died, or because no instance was available."""
        back_s = self.seen.back_s
        if back_s is None:
            return []
        return [a for a in self.answers if not (a.is_complete or a.is_refused) and a.sent_s < back_s]

    @property
    def refused(self) -> list[Answer]:
        """Requests that neither completed nor failed, because the server reported overload."""
        return [answer for answer in self.answers if answer.is_refused]

    @property
    def failed(self) -> list[Answer]:
        excused = {id(answer) for answer in (*self.apart, *self.refused)}
        return [answer for answer in self.answers if not answer.is_complete and id(answer) not in excused]

    @property
    def complete(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_complete]

    @property
    def different(self) -> list[Answer]:
        """Complete requests whose tokens differ from the fault-free run."""
        return [a for a in self.complete if self.expected and a.sample.token_ids != self.expected_of(a)]

    def expected_of(self, answer: Answer) -> Tokens:
        return self.expected[answer.number % len(self.expected)]

    def results(self) -> list[Result]:
        """All measured figures of this run, with their goals."""
        num_complete = len(self.complete)
        num_counted = num_complete + len(self.failed)
        gaps_s = [max(a.sample.itl_s) for a in self.complete if a.sample.itl_s]
        waits_s = [a.sample.ttft_s for a in self.complete if a.sample.ttft_s is not None]
        found = [
            share("complete", num_complete, num_counted, COMPLETE_GOAL),
            share("exact", num_complete - len(self.different), num_complete if self.expected else 0, 100.0),
            worst("seen after", self.seen.detected_s, self.fault.goal_s if self.fault else None),
            worst("served after", self.seen.served_s, SERVED_GOAL_S),
            worst("worst gap", gaps_s),
            worst("worst wait", waits_s),
            counted("replayed", self.num_replayed, "requests"),
            counted("apart", len(self.apart), "requests"),
            counted("refused", len(self.refused), "requests"),
            *self.seen.figures,
            counted("held", self.num_held, "blocks", 0),
            *self.left.results(),
        ]
        return [replace(each, name=f"{self.key} {each.name}") for each in found if each.value is not None]


def share(name: str, count: int, total: int, goal: float) -> Result:
    """Returns a percentage, without a value if there is nothing to compare."""
    value = 100 * count / total if total else None
    return Result(name=name, value=value, unit="%", better="higher", samples=total, goal=goal)


def worst(name: str, values_s: Sequence[float], goal_s: float | None = None) -> Result:
    """Returns the longest time, without a value if none was measured."""
    return result(name, values_s, "s", goal=goal_s, at=100)


def show(title: str, runs: Sequence[Run]) -> None:
    """Prints a line for each run, then missed goals, and every request that failed or differs."""
    print_table(title, ("", *COLUMNS, "goals"), [_row(run) for run in runs], right=COLUMNS)
    print(LEGEND)
    for run in runs:
        for each in run.results():
            if each.met is False:
                print(f"not reached: {each.name} {each.value:g} {each.unit}, the goal is {each.goal:g}")
        for line in _faults_of(run):
            print(line)


def is_right(runs: Sequence[Run]) -> bool:
    """Returns whether all runs met all goals that do not depend on the machine's speed."""
    return not any(r.met is False for run in runs for r in run.results() if r.unit in ("%", "blocks", "requests"))


def _row(run: Run) -> list[str]:
    found = {each.name.removeprefix(f"{run.key} "): each for each in run.results()}
    cells = [_cell(found.get(name)) for name in COLUMNS[1:]]
    reached = all(each.met is not False for each in found.values())
    apart = f" ({len(run.apart)} apart)" if run.apart else ""
    apart += f" ({len(run.refused)} refused)" if run.refused else ""
    return [run.title, f"{len(run.answers)}{apart}", *cells, "reached" if reached else "NO"]


def _cell(figure: Result | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    return {"%": f"{figure.value:.4g} %", "s": f"{figure.value:.2f} s"}.get(figure.unit, f"{figure.value:g}")


def _faults_of(run: Run) -> list[str]:
    """Describes the first requests that failed or differ."""
    lines = [
        f"{run.title}: request {a.number} ({' and '.join(a.sample.served_by) or 'nobody'}, "
        f"{len(a.sample.token_ids)} tokens, {a.ended_s - a.sent_s:.1f} s) failed: {a.sample.error}"
        for a in run.failed[:MAX_SHOWN]
    ]
    for a in run.different[:MAX_SHOWN]:
        expected, found = run.expected_of(a), a.sample.token_ids
        at = first_difference(expected, found)
        lines.append(
            f"{run.title}: request {a.number} ({' and '.join(a.sample.served_by)}) differs from token {at} on: "
            f"{list(found[at : at + 5])} instead of {list(expected[at : at + 5])} "
            f"({len(found)} of {len(expected)} tokens)"
        )
    return lines


def first_difference(expected: Tokens, found: Tokens) -> int:
    """Returns the first position at which the two differ; the length of the shorter one if there is none."""
    pairs = zip(expected, found, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found)))
