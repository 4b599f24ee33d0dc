"""Successive halving: all candidates run a short load, the best third a load that is three times as long, and so on.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pd_cluster.plan.candidate_runs import CandidateRun
from pd_cluster.plan.layout_candidates import LayoutCandidate

FACTOR = 3  # each stage keeps one candidate in three, and runs three times the load
NUM_FINALISTS = 10  # at least this many layouts run the whole load
NUM_FIRST = 100  # the fewest requests of a load
Measure = Callable[[LayoutCandidate, int], CandidateRun]


def prefixes(num_requests: int, num_first: int = NUM_FIRST) -> list[int]:
    """Returns the lengths of the loads, ascending; the last is the whole load."""
    found = [num_requests]
    while found[0] // FACTOR >= num_first:
        found.insert(0, found[0] // FACTOR)
    return found


def halve(candidates: Iterable[LayoutCandidate], measure: Measure, lengths: Sequence[int]) -> list[CandidateRun]:
    """Returns the runs of the whole load, the least strained first.

    The best hybrid and the best split layout are kept to the end, for comparison.
    """
    left, trials = list(candidates), list[CandidateRun]()
    for at, length in enumerate(lengths):
        trials = sorted((measure(each, length) for each in left), key=order)
        is_last = at == len(lengths) - 1
        num_kept = len(trials) if is_last else max(NUM_FINALISTS, -(-len(trials) // FACTOR))
        left = [each.candidate for each in kept(trials, num_kept)]
    return trials


def kept(trials: Sequence[CandidateRun], num_kept: int) -> list[CandidateRun]:
    """Returns the first runs. If all are hybrid or all are split, the next run of the other kind replaces the last."""
    first = list(trials[:num_kept])
    kinds = {each.candidate.is_hybrid for each in first}
    missing = next((each for each in trials[num_kept:] if each.candidate.is_hybrid not in kinds), None)
    return first if missing is None else [*first[:-1], missing]


def order(trial: CandidateRun) -> tuple[float, float]:
    """The sort key of runs: the least strained first. If too few requests were answered in time, by goodput."""
    return trial.strain, -trial.goodput_per_s
