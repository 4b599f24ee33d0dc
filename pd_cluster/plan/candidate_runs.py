"""Simulates candidates under loads and caches the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pd_cluster.bench.outcomes import goodput_per_s
from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.plan.computed_costs import Infeasible
from pd_cluster.plan.layout_candidates import LayoutCandidate
from pd_cluster.plan.plan_goals import PlanGoals
from pd_cluster.simulate.simulated_layout import Simulated, SimulatedLayout


class Simulate(Protocol):
    """The simulator."""

    def __call__(self, layout: SimulatedLayout, costs: Costs, arrivals: Sequence[Arrival]) -> Simulated: ...


CostsOf = Callable[[LayoutCandidate], Costs | Infeasible]


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """The result of a candidate under the trace's first `num_requests` requests, sent `factor` times as fast."""

    candidate: LayoutCandidate
    num_requests: int
    factor: float
    strain: float  # see PlanGoals
    share_met: float  # the share of requests within the goals
    goodput_per_s: float

    @property
    def is_met(self) -> bool:
        return self.strain <= 1

    @property
    def goodput_per_device(self) -> float:
        """Returns the requests per second and device that were within the goals."""
        return self.goodput_per_s / self.candidate.num_devices


@dataclass(slots=True)
class CandidateRuns:
    """Runs candidates under parts of one trace."""

    arrivals: Sequence[Arrival]
    goals: PlanGoals
    costs_of: CostsOf
    simulate: Simulate
    _found: dict[tuple[LayoutCandidate, int, float], CandidateRun] = field(default_factory=dict)
    _costs: dict[LayoutCandidate, Costs | Infeasible] = field(default_factory=dict)

    def costs(self, candidate: LayoutCandidate) -> Costs | Infeasible:
        if (found := self._costs.get(candidate)) is None:
            found = self._costs[candidate] = self.costs_of(candidate)
        return found

    def run(self, candidate: LayoutCandidate, num_requests: int, factor: float = 1.0) -> CandidateRun:
        key = (candidate, num_requests, factor)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = self._run(candidate, num_requests, factor)
        return found

    def simulated(self, candidate: LayoutCandidate, num_requests: int, factor: float = 1.0) -> Simulated:
        """Simulates a candidate without the cache, and returns the full result."""
        costs = self.costs(candidate)
        assert not isinstance(costs, Infeasible)
        return self.simulate(candidate.layout, costs, at_rate(self.arrivals[:num_requests], factor))

    def _run(self, candidate: LayoutCandidate, num_requests: int, factor: float) -> CandidateRun:
        simulated = self.simulated(candidate, num_requests, factor)
        outcomes, slo = simulated.outcomes, self.goals.slo
        share_met = sum(map(slo.met_by, outcomes)) / max(1, len(outcomes))
        goodput = goodput_per_s(outcomes, slo, simulated.duration_s)
        return CandidateRun(candidate, num_requests, factor, self.goals.strain(outcomes), share_met, goodput)


def at_rate(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Returns the same requests, sent `factor` times as fast."""
    if factor == 1:
        return list(arrivals)
    return [msgspec.structs.replace(each, at_s=each.at_s / factor) for each in arrivals]


def rate_per_s(arrivals: Sequence[Arrival]) -> float:
    """Returns the requests per second; 1 for a single request."""
    duration_s = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    return (len(arrivals) - 1) / duration_s if duration_s > 0 else 1.0
