"""The output of `benchmarks engine`: throughput, parts of a step, tokens that agree, goals.

The file of `--json FILE` has, besides what every bench writes,

    "goals": [{"name", "goal", "better", "unit", "min", "median", "max", "samples", "met", "missing"}],
    "engines": [{"name", "version", "settings", "missing", "equal": {workload: {"tokens", "first_tokens"}}}]

where `equal` are the shares of tokens that equal generate()'s, and `missing` says why an engine could not be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.goals import (
    OURS,
    PARTS,
    REFERENCE,
    Goal,
    Round,
    equal_tokens,
    guided_goals,
    lowest_median_highest,
    step_goals,
    throughput_goals,
)
from pd_cluster.tables import Report, Result, print_table, spread

FEW_EQUAL_FIRST = 0.9  # below it an engine computes something else
UNITS = {"_ms": "ms", "_percent": "%", "_gb_per_s": "GB/s", "_tokens": "tokens"}


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's own report, and how far its tokens agree with generate()'s."""

    name: str
    version: str
    settings: str
    missing: str | None
    equal: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in ("name", "version", "settings", "missing", "equal")}


@dataclass(frozen=True, slots=True)
class EngineReport(Report):
    goals: list[Goal]
    engines: list[Engine]

    def to_json(self) -> dict[str, Any]:
        return {
            **Report.to_json(self),
            "goals": [goal.to_json() for goal in self.goals],
            "engines": [engine.to_json() for engine in self.engines],
        }


def make_report(
    command: str, rounds: Sequence[Round], peers: Sequence[str], missing: Mapping[str, str]
) -> EngineReport:
    why = dict(missing)
    if REFERENCE not in peers:
        why[REFERENCE] = f"--peers does not name {REFERENCE}"
    others = [name for name in peers if name != REFERENCE]
    return EngineReport(
        command,
        [*_throughputs(rounds, [OURS, *peers]), *_figures(rounds)],
        [*throughput_goals(rounds, others, why), *step_goals(rounds), *guided_goals(rounds)],
        [_engine(name, rounds, why.get(name)) for name in (OURS, *peers)],
    )


def show(report: EngineReport, title: str) -> None:
    """Prints engines, figures, goals, and notes about tokens that differ."""
    report.show(title)
    rows = [
        [engine.name, workload, f"{equal['tokens']:.2%}", f"{equal['first_tokens']:.2%}"]
        for engine in report.engines
        for workload, equal in engine.equal.items()
    ]
    if rows:
        print_table(
            "tokens equal to generate()'s", ["engine", "workload", "all", "first"], rows, right=("all", "first")
        )
    numbers = ("min", "median", "max")
    print_table("goals", ["", "goal", *numbers, "met"], [goal.row() for goal in report.goals], right=numbers)
    for engine in report.engines:
        if engine.version:
            print(f"{engine.name}: {engine.version}; {engine.settings}")
        low = [workload for workload, equal in engine.equal.items() if equal["first_tokens"] < FEW_EQUAL_FIRST]
        if low:
            print(f"note: {engine.name}: first tokens differ from generate()'s in {', '.join(low)}: not the same model")


def _throughputs(rounds: Sequence[Round], engines: Sequence[str]) -> list[Result]:
    results = []
    for workload in ("uniform", "mixed"):
        for name in engines:
            runs = [each[name].runs[workload] for each in rounds if name in each and workload in each[name].runs]
            rates = [sum(map(len, run.outputs)) / run.took_s for run in runs]
            if rates:
                results.append(_result(f"{workload} {name}", rates, "tokens/s"))
    return results


def _figures(rounds: Sequence[Round]) -> list[Result]:
    found: dict[str, list[float]] = {}
    for each in rounds:
        for module in (module for modules in PARTS.values() for module in modules):
            for name, value in (each[module].figures if module in each else {}).items():
                found.setdefault(name, []).append(value)
    return [_result(name, values, _unit(name)) for name, values in found.items()]


def _unit(name: str) -> str:
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")


def _result(name: str, values: list[float], unit: str) -> Result:
    return Result(
        name=name,
        value=lowest_median_highest(values)[1],
        unit=unit,
        better="lower" if unit in ("ms", "%") else "higher",
        samples=len(values),
        spread=spread(values),
    )


def _engine(name: str, rounds: Sequence[Round], missing: str | None) -> Engine:
    """Builds one engine's entry. Its tokens are the same in every round, so the first round with both is compared."""
    results = [each[name] for each in rounds if name in each]
    equal: dict[str, dict[str, float]] = {}
    for each in rounds:
        if name == REFERENCE or name not in each or REFERENCE not in each:
            continue
        reference = each[REFERENCE].runs
        for workload, run in each[name].runs.items():
            if workload in reference and workload not in equal:
                tokens, first = equal_tokens(run, reference[workload])
                equal[workload] = {"tokens": round(tokens, 5), "first_tokens": round(first, 5)}
    version, settings = (results[0].version, results[0].settings) if results else ("", "")
    return Engine(name, version, settings, missing, equal)
