"""Judges the results of `benchmarks router`: CPU time per token and request, addition to TTFT, memory per stream.

Pure: loads in, results out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.router.spec import LoadResult, Workload
from pd_cluster.tables import Result, percentile, spread

MOST_CPU_TOKEN_US = 50.0
MOST_CPU_REQUEST_MS = 1.25
MOST_ADDED_TTFT_MS = 10.0
MOST_STREAM_KIB = 40.0
OURS = "pd-cluster"

Loaded = tuple[Workload, LoadResult]
TimesS = Mapping[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of the router."""

    token_s: float
    request_s: float

    def of(self, workload: Workload) -> float:
        """Returns the cost of one request of the workload."""
        return self.request_s + workload.num_tokens * self.token_s


@dataclass(slots=True)
class Measured:
    """One router's results.

    `costs`: each round's; `worker_times_s`: a request's seed -> prompt read, first token sent.
    """

    name: str
    costs: list[Cost] = field(default_factory=list)
    paced: Loaded | None = None
    held: Loaded | None = None
    worker_times_s: TimesS = field(default_factory=dict)
    inside_ms: list[float] = field(default_factory=list)  # its addition to TTFT, by its own time stamps
    num_errors: int = 0

    @property
    def cost(self) -> Cost:
        return Cost(median(c.token_s for c in self.costs), median(c.request_s for c in self.costs))


def fit(many_tokens: Loaded, few_tokens: Loaded) -> Cost:
    """Solves two loads of different shapes as two equations: num_tokens * a + num_requests * b = CPU time."""
    (first, first_result), (second, second_result) = many_tokens, few_tokens
    t1, r1, c1 = first.all_tokens, first.num_requests, first_result.cpu_s
    t2, r2, c2 = second.all_tokens, second.num_requests, second_result.cpu_s
    determinant = t1 * r2 - t2 * r1
    return Cost((c1 * r2 - c2 * r1) / determinant, (t1 * c2 - t2 * c1) / determinant)


def added_ttft_s(client: TimesS, worker: TimesS) -> list[float]:
    """Returns, for each request, the client's wait for the first event minus the time that the worker had it."""
    return [
        (first_s - sent_s) - (worker[seed][1] - worker[seed][0])
        for seed, (sent_s, first_s) in client.items()
        if seed in worker
    ]


def results(measured: Sequence[Measured], with_goals: bool = True) -> list[Result]:
    found = [result for each in measured for result in _of_one(each, with_goals)]
    ours = next((each for each in measured if each.name == OURS), None)
    for other in measured:
        if ours is not None and other is not ours and ours.costs and other.costs:
            found += _ratios(ours, other)
    return found


def _of_one(measured: Measured, with_goals: bool) -> list[Result]:
    """Judges one router; only ours has goals."""
    has_goals = with_goals and measured.name == OURS
    found: list[Result] = []

    def add(name: str, values: Sequence[float], unit: str, goal: float | None = None, percent: float = 50) -> None:
        result = Result(
            name=f"{measured.name} {name}",
            value=percentile(values, percent),
            unit=unit,
            better="lower",
            samples=len(values),
            spread=spread(values),
            goal=goal if has_goals else None,
        )
        found.append(result)

    add("cpu_per_token", [1e6 * cost.token_s for cost in measured.costs], "us", MOST_CPU_TOKEN_US)
    add("cpu_per_request", [1e3 * cost.request_s for cost in measured.costs], "ms", MOST_CPU_REQUEST_MS)
    if measured.paced is not None:
        workload, result = measured.paced
        added_ms = [1e3 * each for each in added_ttft_s(result.times_s, measured.worker_times_s)]
        add("requests_per_s", [workload.rate_per_s], "requests/s")
        add("cpu_then", [100 * result.cpu_s / result.took_s], "% of a core")
        if measured.inside_ms:
            add("added_ttft_p50", measured.inside_ms, "ms")
            add("added_ttft_p99", measured.inside_ms, "ms", MOST_ADDED_TTFT_MS, percent=99)
        add("added_ttft_seen_outside_p50", added_ms, "ms")
        add("added_ttft_seen_outside_p99", added_ms, "ms", percent=99)
        add("waited_for_cpu", [100 * result.waited_s / result.took_s], "% of the time")
        add("gap_p99", [1e3 * gap for gap in result.gaps_s], "ms", percent=99)
    if measured.held is not None:
        workload, result = measured.held
        per_stream_kib = (result.rss_after_nbytes - result.rss_before_nbytes) / workload.num_open / 1024
        add("streams_held", [workload.num_open], "streams")
        add("memory_per_stream", [per_stream_kib], "KiB", MOST_STREAM_KIB)
    found.append(
        Result(name=f"{measured.name} errors", value=measured.num_errors, unit="requests", better="lower", goal=0)
    )
    return found


def _ratios(ours: Measured, other: Measured) -> list[Result]:
    """Returns ours as a multiple of the other's; no goal."""
    pairs = list(zip(ours.costs, other.costs, strict=False))
    token = [mine.token_s / its.token_s for mine, its in pairs if its.token_s > 0]
    request = [mine.request_s / its.request_s for mine, its in pairs if its.request_s > 0]
    return [
        Result(
            name=f"cpu_per_{what} / {other.name}'s",
            value=percentile(values, 50),
            unit="x",
            better="lower",
            samples=len(values),
            spread=spread(values),
        )
        for what, values in (("token", token), ("request", request))
    ]
