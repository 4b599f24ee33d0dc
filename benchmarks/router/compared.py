"""Judges `router --against`: the CPU time of a request in two versions of the scheduler, by rounds in turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pd_cluster.tables import Result, spread


def results(ours_s: Sequence[float], theirs_s: Sequence[float]) -> list[Result]:
    """The least times are those that the machine's other work disturbed least."""
    ratios = [mine / other for mine, other in zip(ours_s, theirs_s, strict=True)]

    def row(name: str, value: float, unit: str, values: Sequence[float]) -> Result:
        return Result(name=name, value=value, unit=unit, better="lower", samples=len(values), spread=spread(values))

    return [
        row("cpu_per_request, least", 1e3 * min(ours_s), "ms", ours_s),
        row("cpu_per_request of the other, least", 1e3 * min(theirs_s), "ms", theirs_s),
        row("ratio of the least", min(ours_s) / min(theirs_s), "x", ratios),
        row("ratio of a round, median", median(ratios), "x", ratios),
    ]
