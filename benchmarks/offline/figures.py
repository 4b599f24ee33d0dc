"""Judges the results of `benchmarks offline`. Pure: rounds in, results out. A ratio compares runs of the same round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.engine.goals import equal_tokens
from benchmarks.spec import PeerResult
from pd_cluster.tables import Result, spread

BARE, ONE, SPLIT = "offline_bare", "offline_one", "offline_split"
CONTENDERS = (BARE, ONE, SPLIT)
NAMES = {BARE: "bare engine", ONE: "one process", SPLIT: "split"}
OF_BARE, BUSY = "one process / bare engine", "prefill + decode busy / one process busy"
GOALS = {OF_BARE: 0.95, BUSY: 1.1}
HIGHER_IS_BETTER = ("tokens/s", "%")  # units; the ratios are:
HIGHER_RATIOS = (OF_BARE,)

Round = Mapping[str, PeerResult]  # contender -> its result


def goals_for(num_threads: int) -> dict[str, float]:
    """Returns the goals.

    CPU time is compared only with one thread per process: OpenMP's threads spin while they wait.
    """
    return {name: goal for name, goal in GOALS.items() if name != BUSY or num_threads == 1}


def results(rounds: Sequence[Round], workload: str, goals: Mapping[str, float]) -> list[Result]:
    """Returns medians. Raises KeyError if a round lacks a contender."""
    found = [figures(each, workload) for each in rounds]
    return [
        Result(
            name=name,
            value=median(values),
            unit=unit,
            better="higher" if unit in HIGHER_IS_BETTER or name in HIGHER_RATIOS else "lower",
            samples=len(values),
            spread=spread(values),
            goal=goals.get(name),
        )
        for (name, unit) in found[0]
        for values in [[each[name, unit] for each in found]]
    ]


def figures(each: Round, workload: str) -> dict[tuple[str, str], float]:
    """Returns (name, unit) -> value, for one round.

    Busy is CPU time: all threads of a process, including kernel time.
    """
    runs = {name: each[name].runs[workload] for name in CONTENDERS}
    rates = {name: sum(map(len, run.outputs)) / run.took_s for name, run in runs.items()}
    bare, one, split = (each[name].figures for name in CONTENDERS)
    workers_s = split["prefill_s"] + split["decode_s"]
    return {
        **{(NAMES[name], "tokens/s"): rate for name, rate in rates.items()},
        (OF_BARE, "x"): rates[ONE] / rates[BARE],
        ("split took / one process took", "x"): runs[SPLIT].took_s / runs[ONE].took_s,
        ("bare engine busy", "s"): bare["busy_s"],
        ("one process busy", "s"): one["busy_s"],
        ("split: prefill busy", "s"): split["prefill_s"],
        ("split: decode busy", "s"): split["decode_s"],
        ("split: caller busy", "s"): split["caller_s"],
        (BUSY, "x"): workers_s / one["busy_s"],
        ("all of split busy / one process busy", "x"): (workers_s + split["caller_s"]) / one["busy_s"],
        **{
            (f"{NAMES[name]}: tokens equal to the bare engine's", "%"): 100 * equal_tokens(runs[name], runs[BARE])[0]
            for name in (ONE, SPLIT)
        },
    }
