"""Judges `benchmarks router --schedulers`: the CPU time of several schedulers together, beside that of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.router.spec import Workload
from pd_cluster.tables import Result, spread

MOST = 1.1  # times the CPU time of one scheduler


@dataclass(frozen=True, slots=True)
class Compared:
    """CPU seconds of the same load, of each round, by the number of schedulers that had it together."""

    workload: Workload
    cpu_s: dict[int, list[float]]


def results(found: Sequence[Compared], with_goals: bool) -> list[Result]:
    """The least times are those that the machine's other work disturbed least."""
    rows = []
    for each in found:
        (_, one_s), (number, several_s) = sorted(each.cpu_s.items())
        is_many_tokens = each.workload.num_tokens > 2
        unit, count = ("\u00b5s", each.workload.all_tokens) if is_many_tokens else ("ms", each.workload.num_requests)
        scale, what = (1e6, "token") if is_many_tokens else (1e3, "request")
        for name, values in (("1 scheduler", one_s), (f"{number} schedulers", several_s)):
            value = scale * min(values) / count
            spreads = spread([scale * each_s / count for each_s in values])
            rows.append(
                Result(
                    name=f"cpu_per_{what}, {name}",
                    value=value,
                    unit=unit,
                    better="lower",
                    samples=len(values),
                    spread=spreads,
                )
            )
        ratios = [several / one for several, one in zip(several_s, one_s, strict=True)]
        rows.append(
            Result(
                name=f"cpu_per_{what}, {number} over 1, of the least",
                value=min(several_s) / min(one_s),
                unit="x",
                better="lower",
                samples=len(ratios),
                spread=spread(ratios),
                goal=MOST if with_goals else None,
            )
        )
    return rows
