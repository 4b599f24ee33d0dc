"""Searches for the smallest layout that meets the goals, or the best on N devices. Simulates through `CandidateRuns`.

For a number of devices, estimated strains choose settings for each split. Halving then finds the best splits, and a
second halving finds their best settings. Bisection finds the smallest number of devices, because more devices never
serve less.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_cluster.errors import ConfigError
from pd_cluster.plan.bottleneck import Resource, binding_resource
from pd_cluster.plan.breaking_load import highest_factor
from pd_cluster.plan.candidate_runs import CandidateRun, CandidateRuns, rate_per_s
from pd_cluster.plan.computed_costs import Infeasible
from pd_cluster.plan.layout_candidates import LayoutCandidate, SearchSpace
from pd_cluster.plan.load_estimate import MeanLoad, estimated_strain
from pd_cluster.plan.successive_halving import halve, kept, order, prefixes

NUM_SPLITS = 16  # layouts to simulate first, with the best estimated settings of each split
SETTINGS_OF_SPLIT = 2
NUM_REFINED = 4  # splits whose other settings are simulated, too
NUM_SETTINGS = 18
NUM_SHOWN, SHOWN_OF_SPLIT = 10, 3  # the most layouts in the answer, in total and of one split
MOST_FOR_LIMITS = 400  # the most requests for finding limits, because overload takes long to simulate
PAST_LIMIT = 1.15  # the bottleneck is determined at this many times the highest load


@dataclass(frozen=True, slots=True)
class Ranked:
    """A layout of the answer. `limit`: the highest load that meets the goals, in multiples of the trace's; 0: none."""

    trial: CandidateRun
    limit: float
    limit_goodput_per_s: float
    binding: Resource

    @property
    def candidate(self) -> LayoutCandidate:
        return self.trial.candidate

    @property
    def goodput_per_device(self) -> float:
        """Returns the requests per second and device that are within the goals at the highest load."""
        return self.limit_goodput_per_s / self.candidate.num_devices


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of a search. `ranked`: layouts, the best first. `left_out`: why other layouts are impossible."""

    ranked: list[Ranked]
    rate_per_s: float
    num_requests: int
    num_for_limits: int  # requests used to find limits
    left_out: tuple[str, ...]

    @property
    def first(self) -> Ranked:
        return self.ranked[0]

    @property
    def is_met(self) -> bool:
        return self.first.trial.is_met

    def best_of_kind(self, is_hybrid: bool) -> Ranked | None:
        """Returns the best hybrid or split layout that has as many devices as the first; None if there is none."""
        num_devices = self.first.candidate.num_devices
        alike = (each for each in self.ranked if each.candidate.num_devices == num_devices)
        return next((each for each in alike if each.candidate.is_hybrid == is_hybrid), None)


@dataclass(slots=True)
class Search:
    """A search over `space`. Calls `on_stage` with a description of the next simulation."""

    trials: CandidateRuns
    space: SearchSpace
    on_stage: Callable[[str], None] = lambda line: None
    _load: MeanLoad = field(init=False)
    _left_out: list[str] = field(default_factory=list)
    _seen: dict[int, list[CandidateRun]] = field(default_factory=dict)  # devices -> runs of the whole load

    def __post_init__(self) -> None:
        self._load = MeanLoad.of(self.trials.arrivals)

    def plan(self, num_devices: int) -> Plan:
        """Searches layouts with up to this many devices. Raises ConfigError if none fits."""
        sizes = self._sizes(num_devices)
        if not sizes:
            reasons = "; ".join(self._left_out) or f"an instance has at least {min(self.space.tp_sizes)} ranks"
            raise ConfigError(f"--devices {num_devices}: no layout fits: {reasons}")
        if self._is_met(sizes[-1]):
            low, high = 0, len(sizes) - 1  # the answer is in sizes[low : high + 1]
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._is_met(sizes[middle]) else (middle + 1, high)
        arrivals = self.trials.arrivals
        return Plan(self._ranked(), rate_per_s(arrivals), len(arrivals), self._num_for_limits, tuple(self._left_out))

    @property
    def _num_for_limits(self) -> int:
        """Returns the length of the longest load of the halving that does not exceed MOST_FOR_LIMITS."""
        lengths = prefixes(len(self.trials.arrivals))
        return max((each for each in lengths if each <= MOST_FOR_LIMITS), default=lengths[0])

    def _sizes(self, num_devices: int) -> list[int]:
        """Returns, in ascending order, the numbers of devices with which some layout uses every device."""
        able = [tp_size for tp_size in self.space.tp_sizes if self._fits(tp_size)]
        return [size for size in range(1, num_devices + 1) if any(size % tp_size == 0 for tp_size in able)]

    def _fits(self, tp_size: int) -> bool:
        """Whether an instance with this many ranks is possible with any settings. Records the reason if it is not."""
        found = [self.trials.costs(each) for each in self.space.single(tp_size)]
        reasons = [each.reason for each in found if isinstance(each, Infeasible)]
        if len(reasons) == len(found):
            self._left_out.append(reasons[0])  # the reason for the smallest settings
        return len(reasons) < len(found)

    def _is_met(self, num_devices: int) -> bool:
        return self._best(num_devices)[0].is_met

    def _best(self, num_devices: int) -> list[CandidateRun]:
        """Returns the whole load's runs of the best layouts on at most this many devices, the best first."""
        if (found := self._seen.get(num_devices)) is not None:
            return found
        able = [
            each for each in self.space.candidates(num_devices) if not isinstance(self.trials.costs(each), Infeasible)
        ]
        lengths = prefixes(len(self.trials.arrivals))
        chosen = self._splits(able)
        self.on_stage(f"{num_devices} devices: {len(chosen)} splits, {lengths[0]} requests each at first")
        splits = halve(chosen, self.trials.run, lengths[:-1] or lengths)
        settings = self._variants(able, kept(splits, NUM_REFINED))
        self.on_stage(f"{num_devices} devices: {len(settings)} settings of the best, up to {lengths[-1]} requests each")
        self._seen[num_devices] = halve(settings, self.trials.run, lengths)
        return self._seen[num_devices]

    def _splits(self, able: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
        """Returns the most promising splits, each with its best estimated settings; half are hybrid if possible."""
        usual = [each for each in able if each.layout.routing_policy == self.space.policies[0]]
        found: dict[bool, list[LayoutCandidate]] = {True: [], False: []}
        num_settings = Counter[str]()
        for each in sorted(usual, key=self._guess):
            num_settings[each.name] += 1
            if num_settings[each.name] <= SETTINGS_OF_SPLIT:
                found[each.is_hybrid].append(each)
        num_hybrid = min(len(found[True]), max(NUM_SPLITS // 2, NUM_SPLITS - len(found[False])))
        return [*found[True][:num_hybrid], *found[False][: NUM_SPLITS - num_hybrid]]

    def _variants(self, able: Sequence[LayoutCandidate], best: Sequence[CandidateRun]) -> list[LayoutCandidate]:
        """Returns the layouts of these runs, then other settings: in turn, each split's and policy's best estimates."""
        names = {each.candidate.name for each in best}
        groups: dict[tuple[str, str], list[LayoutCandidate]] = {}
        for each in sorted((each for each in able if each.name in names), key=self._guess):
            groups.setdefault((each.name, each.layout.routing_policy), []).append(each)
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
        found = dict.fromkeys([*(each.candidate for each in best), *(each for each in in_turn if each is not None)])
        return list(found)[:NUM_SETTINGS]

    def _guess(self, candidate: LayoutCandidate) -> float:
        costs = self.trials.costs(candidate)
        assert not isinstance(costs, Infeasible)
        return estimated_strain(candidate, costs, self._load, self.trials.goals)

    def _ranked(self) -> list[Ranked]:
        """Returns the best layouts for all numbers of devices.

        Those that meet the goals come first, the fewest devices first.
        """
        seen = {each.candidate: each for trials in self._seen.values() for each in trials}
        ordered = sorted(seen.values(), key=lambda each: (not each.is_met, _devices(each), order(each)))
        num_settings = Counter[str]()
        first = list[CandidateRun]()
        for each in ordered:
            num_settings[each.candidate.name] += 1
            if num_settings[each.candidate.name] <= SHOWN_OF_SPLIT and len(first) < NUM_SHOWN:
                first.append(each)
        if other := next((each for each in ordered if _is_other(each, ordered[0])), None):
            first = first if other in first else [*first[:-1], other]
        ranked = []
        for at, each in enumerate(first, 1):
            self.on_stage(f"the highest load of {each.candidate.name}, layout {at} of {len(first)}")
            ranked.append(self._with_limit(each))
        return sorted(ranked, key=lambda each: (not each.trial.is_met, _devices(each.trial), *_merit(each)))

    def _with_limit(self, trial: CandidateRun) -> Ranked:
        candidate, num, run = trial.candidate, self._num_for_limits, self.trials.run
        limit = highest_factor(lambda factor: run(candidate, num, factor).is_met)
        goodput = run(candidate, num, limit).goodput_per_s if limit else 0.0
        costs = self.trials.costs(candidate)
        assert not isinstance(costs, Infeasible)
        past = self.trials.simulated(candidate, num, limit * PAST_LIMIT if limit else 1.0)
        return Ranked(trial, limit, goodput, binding_resource(candidate, costs, past, self.trials.goals))


def _devices(trial: CandidateRun) -> int:
    """Returns the number of devices to sort by; 0 for all runs that miss the goals."""
    return trial.candidate.num_devices if trial.is_met else 0


def _merit(ranked: Ranked) -> tuple[float, float]:
    return (-ranked.limit, 0.0) if ranked.trial.is_met else order(ranked.trial)


def _is_other(trial: CandidateRun, first: CandidateRun) -> bool:
    """Whether both have the same number of devices, and exactly one of them is hybrid."""
    one, other = trial.candidate, first.candidate
    return one.num_devices == other.num_devices and one.is_hybrid != other.is_hybrid
