"""Simulates candidates under a load, each once, and remembers what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pd_cluster.bench.arrivals import Arrival
from pd_cluster.bench.outcomes import goodput_per_s
from pd_cluster.costs.costs import Costs
from pd_cluster.plan.candidates import LayoutCandidate
from pd_cluster.plan.computed_costs import Unfit
from pd_cluster.plan.goals import PlanGoals
from pd_cluster.simulate.scenario import Simulated, SimulatedLayout


class Simulate(Protocol):
    """The simulator."""

    def __call__(self, layout: SimulatedLayout, costs: Costs, arrivals: Sequence[Arrival]) -> Simulated: ...


CostsOf = Callable[[LayoutCandidate], Costs | Unfit]


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate under the first `num_requests` of the trace, sent `factor` times as fast."""

    candidate: LayoutCandidate
    num_requests: int
    factor: float
    strain: float  # see PlanGoals
    share_met: float  # of the requests
    goodput_per_s: float

    @property
    def is_met(self) -> bool:
        return self.strain <= 1

    @property
    def goodput_per_device(self) -> float:
        """Returns the requests a second within the goals, divided by the devices."""
        return self.goodput_per_s / self.candidate.num_devices


@dataclass(slots=True)
class Trials:
    """Candidates under parts of one trace."""

    arrivals: Sequence[Arrival]
    goals: PlanGoals
    costs_of: CostsOf
    simulate: Simulate
    _found: dict[tuple[LayoutCandidate, int, float], Trial] = field(default_factory=dict)
    _costs: dict[LayoutCandidate, Costs | Unfit] = field(default_factory=dict)

    def costs(self, candidate: LayoutCandidate) -> Costs | Unfit:
        if (found := self._costs.get(candidate)) is None:
            found = self._costs[candidate] = self.costs_of(candidate)
        return found

    def run(self, candidate: LayoutCandidate, num_requests: int, factor: float = 1.0) -> Trial:
        key = (candidate, num_requests, factor)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = self._trial(candidate, num_requests, factor)
        return found

    def simulated(self, candidate: LayoutCandidate, num_requests: int, factor: float = 1.0) -> Simulated:
        """Simulates anew, and returns the whole of it."""
        costs = self.costs(candidate)
        assert not isinstance(costs, Unfit)
        return self.simulate(candidate.layout, costs, at_rate(self.arrivals[:num_requests], factor))

    def _trial(self, candidate: LayoutCandidate, num_requests: int, factor: float) -> Trial:
        simulated = self.simulated(candidate, num_requests, factor)
        outcomes, slo = simulated.outcomes, self.goals.slo
        share_met = sum(map(slo.met_by, outcomes)) / max(1, len(outcomes))
        goodput = goodput_per_s(outcomes, slo, simulated.duration_s)
        return Trial(candidate, num_requests, factor, self.goals.strain(outcomes), share_met, goodput)


def at_rate(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Returns the same requests, sent `factor` times as fast."""
    if factor == 1:
        return list(arrivals)
    return [msgspec.structs.replace(each, at_s=each.at_s / factor) for each in arrivals]


def rate_per_s(arrivals: Sequence[Arrival]) -> float:
    """Returns the requests a second; of a single one, 1."""
    duration_s = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    return (len(arrivals) - 1) / duration_s if duration_s > 0 else 1.0
