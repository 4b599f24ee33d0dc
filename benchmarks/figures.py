"""Computes figures from several rounds, and finishes a benchmark: table, notes and file. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pd_cluster.errors import ConfigError
from pd_cluster.result_tables import Better, Report, Result, check_writable, percentile, spread

BUSY_LOAD = 0.7  # load by other processes above which figures are unreliable, because spinning threads suffer most


def result(
    name: str, values: Sequence[float], unit: str, better: Better = "lower", goal: float | None = None, at: float = 50
) -> Result:
    """Returns the median of the values, or another percentile; a result without a value if there are none."""
    return Result(
        name=name,
        value=percentile(values, at),
        unit=unit,
        better=better,
        samples=len(values),
        spread=spread(values),
        goal=goal,
    )


def ratio(values: Sequence[float], base: Sequence[float], percent: float) -> list[float]:
    """Returns the ratio of the same percentile of both, in a list; [] without values or with a base of 0."""
    one, other = percentile(values, percent), percentile(base, percent)
    return [one / other] if one is not None and other else []


def names_of(flag: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names, which commas separate; all if none is given. Raises ConfigError for an unknown name."""
    names = tuple(filter(None, map(str.strip, text.split(","))))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{flag} {unknown[0]}: expected some of {','.join(known)}")
    return names or tuple(known)


def begin(json: str) -> None:
    """Checks that the file can be written before anything is measured. Raises ConfigError."""
    check_writable(json)
    if (load := os.getloadavg()[0]) > BUSY_LOAD:
        print(f"note: this machine is busy already (load {load:.1f}); expect low figures and a wide spread", flush=True)


def finish(report: Report, title: str, json: str, quick: bool = False) -> None:
    """Shows and writes the report; a quick run has no goals."""
    if quick:
        report = Report(report.command, [replace(each, goal=None) for each in report.results])
    report.show(title)
    if quick:
        print("note: --quick only checks that everything runs; its figures mean nothing")
    if json:
        report.write(json)
