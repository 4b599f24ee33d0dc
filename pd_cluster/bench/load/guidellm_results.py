"""Reads the plug-in's lines as outcomes, grouped by guidellm's runs. Knows nothing of clusters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.bench.outcomes import GapCounts, Outcome
from pd_cluster.errors import GenerationError


class RequestLine(msgspec.Struct, frozen=True):
    """An ended request. Times are Unix times in seconds. `after_us`: token events' times after the first event."""

    request_id: str
    response_id: str | None
    run_s: float  # when guidellm's run began
    planned_s: float | None
    sent_s: float | None
    first_s: float | None
    last_s: float | None
    after_us: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error: str
    is_cut_off: bool  # the end of guidellm's run cut it off


class GuidellmConfig(msgspec.Struct, frozen=True):
    strategy: dict[str, Any] = {}


class GuidellmBenchmark(msgspec.Struct, frozen=True):
    config: GuidellmConfig = GuidellmConfig()


class GuidellmReport(msgspec.Struct, frozen=True):
    benchmarks: list[GuidellmBenchmark]
    conclusions: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True)
class GuidellmRun:
    """One of guidellm's runs. `start_s`: Unix time of its first request, the zero of its outcomes' times."""

    name: str
    start_s: float
    duration_s: float
    outcomes: list[Outcome]
    gaps: GapCounts
    num_cut_off: int


def read_results(folder: Path) -> tuple[list[GuidellmRun], list[dict[str, Any]]]:
    """Returns guidellm's runs, and the results of its profile. Raises GenerationError for unreadable files."""
    try:
        report = msgspec.json.decode((folder / "guidellm.json").read_bytes(), type=GuidellmReport)
        decoder = msgspec.json.Decoder(RequestLine)
        lines = [
            line for file in sorted(folder.glob("requests-*.jsonl")) for line in decoder.decode_lines(file.read_bytes())
        ]
    except (OSError, msgspec.DecodeError) as error:
        raise GenerationError(f"guidellm left no report that can be read in {folder}: {error}") from None
    lines.sort(key=lambda line: (line.run_s, line.sent_s or 0.0, line.request_id))
    names = [name_of(benchmark.config.strategy) for benchmark in report.benchmarks]
    grouped = [list(group) for _, group in itertools.groupby(lines, key=lambda line: line.run_s)]
    named = itertools.zip_longest(names[: len(grouped)], grouped, fillvalue="run")
    return [
        run_of(str(name), [line for line in group if isinstance(line, RequestLine)]) for name, group in named
    ], report.conclusions


def run_of(name: str, lines: Sequence[RequestLine]) -> GuidellmRun:
    """Makes a run from the lines, in order of sending. Requests that were never sent count as sent at the beginning."""
    start_s = next((line.sent_s for line in lines if line.sent_s), 0.0)
    gaps = GapCounts()
    outcomes = [_outcome(line, start_s, gaps) for line in lines if not line.is_cut_off]
    duration_s = max((each.last_s or each.sent_s for each in outcomes), default=0.0)
    return GuidellmRun(name, start_s, duration_s, outcomes, gaps, len(lines) - len(outcomes))


def _outcome(line: RequestLine, start_s: float, gaps: GapCounts) -> Outcome:
    sent_s = line.sent_s or start_s
    between_s = [1e-6 * (after - before) for before, after in itertools.pairwise(line.after_us)]
    for gap_s in between_s:
        gaps.add(gap_s)
    return Outcome(
        request_id=line.response_id or line.request_id,
        sent_s=sent_s - start_s,
        first_s=None if line.first_s is None else line.first_s - start_s,
        last_s=None if line.last_s is None else line.last_s - start_s,
        num_prompt_tokens=line.num_prompt_tokens,
        num_cached_tokens=line.num_cached_tokens,
        num_output_tokens=line.num_output_tokens,
        longest_gap_s=max(between_s, default=0.0),
        late_s=max(0.0, sent_s - line.planned_s) if line.planned_s else 0.0,
        error=line.error,
    )


def name_of(strategy: dict[str, Any]) -> str:
    """Returns a name such as "poisson, rate 2.5"."""
    numbers = [f"{name} {strategy[name]:g}" for name in ("rate", "streams") if strategy.get(name)]
    return ", ".join([str(strategy.get("type_", "run")), *numbers])
