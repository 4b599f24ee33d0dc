"""The report of a measured or simulated load: figures, and the instances' state over time.

Depends only on outcomes and samples; equal runs give equal bytes. `pd_cluster.commands.load_chart` draws `over_time`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pd_cluster.bench.outcomes import GapCounts, InstanceSample, Outcome, Slo, goodput_per_s
from pd_cluster.output_files import write_output
from pd_cluster.result_tables import Report, Result, counted, percentiles

NUM_INTERVALS = 60  # intervals of the series over time
BUSY_CLIENT = 0.8  # share of a core above which the client's own delays affect its measurements
LATE_SHARE = 0.1  # share of the median TTFT above which the median delay of sending changes the load
LEAST_LATE_S = 0.010
STAGES = ("prefill", "handover", "decode")  # stages of a request; KV arrives at the end of "handover"


@dataclass(slots=True)
class LoadRun:
    """An ended load. Times are seconds since its start."""

    title: str
    duration_s: float  # the time from the first request until the last answer
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[InstanceSample] = field(default_factory=list)
    slo: Slo = field(default_factory=Slo)
    gaps: GapCounts = field(default_factory=GapCounts)  # times between all tokens
    events: list[tuple[float, str]] = field(default_factory=list)
    client_core_share: float | None = None  # share of a core that the client's busiest process used; None: simulated

    @property
    def slowed_by(self) -> str:
        """How the client slowed the run; "" if it did not."""
        if self.client_core_share is not None and self.client_core_share > BUSY_CLIENT:
            return f"the client took {self.client_core_share:.0%} of a core"
        ttft_s = sorted(each.ttft_s for each in self.outcomes if each.ttft_s is not None)
        late_s = sorted(each.late_s for each in self.outcomes)
        if not ttft_s or late_s[len(late_s) // 2] <= max(LEAST_LATE_S, LATE_SHARE * ttft_s[len(ttft_s) // 2]):
            return ""
        return f"half of the requests were sent {1e3 * late_s[len(late_s) // 2]:.0f} ms late or later"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Means over one part of a run. Keys are stages or roles; shares refer to the role's blocks."""

    at_s: float  # the middle of the interval
    num_in: dict[str, float]  # stage -> number of requests in it
    num_running: dict[str, float]  # role -> number of sequences in an instance's batch
    num_waiting: dict[str, float]
    held_share: dict[str, float]


def report_of(run: LoadRun, command: str) -> Report:
    """Returns the figures as a table."""
    return Report(command, results_of(run))


def results_of(run: LoadRun) -> list[Result]:
    """Returns the figures that were measured; the client's times are always among them."""
    good = [each for each in run.outcomes if not each.error]
    num_prompt, num_cached = _total(good, "num_prompt_tokens"), _total(good, "num_cached_tokens")
    found = [
        *_times("ttft", good, lambda each: each.ttft_s),
        *_times("tpot", good, lambda each: each.tpot_s),
        *_gap_results(run.gaps),
        *_times("longest_gap", good, lambda each: each.longest_gap_s if each.num_output_tokens > 1 else None, (50, 99)),
        *_times("e2e", good, lambda each: each.e2e_s),
        *_stage_results(good),
        _rate("goodput", goodput_per_s(run.outcomes, run.slo, run.duration_s), "requests/s", len(run.outcomes)),
        _share("slo_met", sum(map(run.slo.met_by, run.outcomes)), len(run.outcomes), len(run.outcomes)),
        _rate("requests", _per_s(len(good), run), "requests/s", len(good)),
        _rate("output_tokens", _per_s(_total(good, "num_output_tokens"), run), "tokens/s", len(good)),
        _rate("prompt_tokens", _per_s(num_prompt, run), "tokens/s", len(good)),
        _share("cache_hits", num_cached, num_prompt, len(good)),
        counted("errors", len(run.outcomes) - len(good), "requests"),
    ]
    if run.client_core_share is not None:
        found.append(counted("client", round(run.client_core_share, 3), "of a core", BUSY_CLIENT))
    return found


def over_time(run: LoadRun, num_intervals: int = NUM_INTERVALS) -> list[Interval]:
    """Returns means over equal parts of the run, for roles with sampled instances."""
    length_s = run.duration_s / num_intervals
    if length_s <= 0:
        return []
    ends_s = [length_s * (at + 1) for at in range(num_intervals)]
    num_in = {stage: [0.0] * num_intervals for stage in STAGES}
    for outcome in run.outcomes:
        for stage, start_s, stop_s in stages_of(outcome):
            _spread_over(num_in[stage], start_s, stop_s, length_s)
    by_interval: list[list[InstanceSample]] = [[] for _ in ends_s]
    for sample in run.samples:
        by_interval[min(num_intervals - 1, bisect_right(ends_s, sample.at_s))].append(sample)
    return [
        Interval(
            at_s=length_s * (at + 0.5),
            num_in={stage: num_in[stage][at] for stage in STAGES},
            num_running=_means(found, lambda each: each.num_running),
            num_waiting=_means(found, lambda each: each.num_waiting),
            held_share=_means(found, lambda each: each.num_held_blocks / each.num_blocks if each.num_blocks else 0.0),
        )
        for at, found in enumerate(by_interval)
    ]


def stages_of(outcome: Outcome) -> list[tuple[str, float, float]]:
    """Returns (stage, start, stop) in seconds; [] if the request's last token or prefill is unknown."""
    if outcome.last_s is None or outcome.prefill_s is None:
        return []
    computed_s = min(outcome.last_s, outcome.sent_s + outcome.prefill_s)
    handed_s = min(outcome.last_s, computed_s + (outcome.handover_s or 0.0))
    bounds = (outcome.sent_s, computed_s, handed_s, outcome.last_s)
    return [(stage, bounds[at], bounds[at + 1]) for at, stage in enumerate(STAGES)]


def to_json(run: LoadRun, command: str) -> dict[str, Any]:
    """Returns the figures in the form of `result_tables.Report`, the goals, each request and the series over time."""
    found: dict[str, Any] = _rounded(
        {
            **report_of(run, command).to_json(),
            "title": run.title,
            "duration_s": run.duration_s,
            "slo": msgspec.to_builtins(run.slo),
            "slowed_by": run.slowed_by,
            "events": [{"at_s": at_s, "event": text} for at_s, text in run.events],
            "over_time": [msgspec.to_builtins(each) for each in over_time(run)],
            "requests": [msgspec.to_builtins(each) for each in run.outcomes],
        }
    )
    return found


def write_json(run: LoadRun, command: str, file: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    write_output(file, "--json", (json.dumps(to_json(run, command), indent=1) + "\n").encode())


def show(run: LoadRun, command: str) -> None:
    """Prints the table, the first error, and a line if the client slowed the run."""
    report_of(run, command).show(run.title)
    if errors := [each.error for each in run.outcomes if each.error]:
        print(f"{len(errors)} of {len(run.outcomes)} requests failed; the first: {errors[0]}", flush=True)
    if run.slowed_by:
        print(f"NOT VALID: {run.slowed_by}; the server got a smaller or smoother load", flush=True)


def _times(
    name: str, outcomes: Iterable[Outcome], taken: Callable[[Outcome], float | None], percents: Sequence[int] = ()
) -> list[Result]:
    values_ms = [1e3 * taken_s for each in outcomes if (taken_s := taken(each)) is not None]
    return percentiles(name, values_ms, "ms", percents or (50, 90, 99))


def _stage_results(outcomes: list[Outcome]) -> list[Result]:
    """Returns the known durations of stages."""
    taken_ms: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for each in outcomes:
        for stage, start_s, stop_s in stages_of(each):
            taken_ms[stage].append(1e3 * (stop_s - start_s))
    return [
        result
        for stage, values in taken_ms.items()
        if values
        for result in percentiles(f"{stage}_stage", values, "ms", (50, 90))
    ]


def _gap_results(gaps: GapCounts) -> list[Result]:
    if not len(gaps):
        return []
    found = [(percent, gaps.percentile(percent)) for percent in (50, 90, 99)]
    return [
        Result(name=f"itl_p{percent}", value=1e3 * (gap_s or 0), unit="ms", better="lower", samples=len(gaps))
        for percent, gap_s in found
    ]


def _total(outcomes: Iterable[Outcome], name: str) -> int:
    return sum(getattr(each, name) for each in outcomes)


def _per_s(count: int, run: LoadRun) -> float:
    return count / run.duration_s if run.duration_s > 0 else 0.0


def _rate(name: str, value: float, unit: str, samples: int) -> Result:
    return Result(name=name, value=value, unit=unit, better="higher", samples=samples)


def _share(name: str, part: int, whole: int, samples: int) -> Result:
    value = 100 * part / whole if whole else None
    return Result(name=name, value=value, unit="%", better="higher", samples=samples)


def _spread_over(sums: list[float], start_s: float, stop_s: float, length_s: float) -> None:
    """Adds to each interval the share of it that lies between the two times."""
    at = max(0, int(start_s / length_s))
    while at < len(sums) and at * length_s < stop_s:
        inside_s = min(stop_s, (at + 1) * length_s) - max(start_s, at * length_s)
        sums[at] += max(0.0, inside_s) / length_s
        at += 1


def _means(samples: Iterable[InstanceSample], value: Callable[[InstanceSample], float]) -> dict[str, float]:
    """Returns role -> mean."""
    by_role: dict[str, list[float]] = {}
    for each in samples:
        by_role.setdefault(each.role, []).append(value(each))
    return {role: sum(values) / len(values) for role, values in sorted(by_role.items())}


def _rounded(value: Any) -> Any:
    """Rounds to microseconds, because more digits are noise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
