"""Prints a comparison's table, and writes its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from pd_cluster.bench.compare.compared_servers import waits_of, where
from pd_cluster.bench.compare.comparison_spec import ComparisonSpec
from pd_cluster.bench.compare.round_ratios import Compared, ComparedRun, MedianRange, compared, results, slow_runs
from pd_cluster.bench.outcomes import Slo
from pd_cluster.output_files import write_output
from pd_cluster.result_tables import Report, print_table

COLUMNS = {  # figure -> its column; the columns with a ratio come first
    "ttft_p50": "TTFT p50 ms",
    "itl_p99": "between tokens p99 ms",
    "output_tokens": "tokens/s",
    "goodput": "goodput/s",
    "slo_met": "in goals %",
    "errors": "errors",
    "cores": "cores",
    "idle_cores": "idle cores",
}
WITH_RATIO = tuple(COLUMNS)[:4]


def show(spec: ComparisonSpec, runs: Sequence[ComparedRun], slo: Slo, env: dict[str, str]) -> None:
    """Prints one table: medians over rounds, ratios with ranges, constant work, and how servers wait."""
    found = {(each.server, each.level, each.name): each for each in compared(runs)}
    headers = ["", *([spec.level_name] if spec.level_name else [])]
    for name, title in COLUMNS.items():
        headers += [title, *(["times"] if name in WITH_RATIO else [])]
    rows = []
    for level in spec.levels:
        for server in spec.server:
            row = [server.name, *([f"{level:g}"] if spec.level_name else [])]
            for name in COLUMNS:
                row += _cells(found.get((server.name, level, name)), name in WITH_RATIO)
            rows.append(row)
    range_of = "95 % of the median" if spec.rounds >= 6 else "lowest-highest"
    title = (
        f"{spec.rounds} rounds on {where(spec.core_set)}; ratios to {spec.server[0].name} within a round ({range_of})"
    )
    print_table(title, headers, rows, right=headers[1:])
    print(f"goals: TTFT {_goal(slo.ttft_s)}, TPOT {_goal(slo.tpot_s)}, end to end {_goal(slo.e2e_s)}")
    taken = [run.constant_s for run in runs]
    print(f"constant work between the runs: {median(taken):.2f} s ({min(taken):.2f}-{max(taken):.2f})")
    slow = (
        f"round {run.round_ + 1}, {run.server}: constant work took {run.constant_s:.2f} s" for run in slow_runs(runs)
    )
    for each in dict.fromkeys(slow):
        print(f"note: {each}; the machine was slow")
    for slowed in dict.fromkeys(f"{run.server}: {run.load.slowed_by}" for run in runs if run.load.slowed_by):
        print(f"NOT VALID: {slowed}; the server got a smaller or smoother load")
    for contender in spec.server:
        print(f"compute threads of {contender.name}: {waits_of(contender, env)}")


def _cells(each: Compared | None, has_ratio: bool) -> list[str]:
    value = "-" if each is None or each.value is None else f"{each.value.middle:.4g}"
    ratio = "" if each is None or each.ratio is None else in_times(each.ratio)
    return [value, ratio] if has_ratio else [value]


def in_times(span: MedianRange) -> str:
    return f"{span.middle:.2f} ({span.low:.2f}-{span.high:.2f})"


def _goal(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds else "none"


def write_json(spec: ComparisonSpec, runs: Sequence[ComparedRun], slo: Slo, command: str, file: str) -> None:
    """Writes the figures in the format of all benchmarks, ratios with ranges, the spec and each run.

    Raises ConfigError if the file cannot be written.
    """
    found: dict[str, Any] = {
        **Report(command, list(results(runs))).to_json(),
        "spec": msgspec.to_builtins(spec),
        "slo": msgspec.to_builtins(slo),
        "compared": [msgspec.to_builtins(each) for each in compared(runs)],
        "runs": [_run(run) for run in runs],
    }
    write_output(file, "--json", (json.dumps(found, indent=1) + "\n").encode())


def _run(run: ComparedRun) -> dict[str, Any]:
    return {
        "server": run.server,
        "round": run.round_ + 1,
        "level": run.level,
        "constant_s": run.constant_s,
        "slowed_by": run.load.slowed_by,
        "figures": {name: each.value for name, each in run.figures().items()},
    }
