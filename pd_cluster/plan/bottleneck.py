"""Finds the resource that a load exhausts first, from its outcomes and from samples of its instances.

The slowest requests show which goal is missed and where their time went; samples show which resource was full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pd_cluster.bench.outcomes import InstanceSample, Outcome
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.plan.layout_candidates import LayoutCandidate
from pd_cluster.plan.plan_goals import PlanGoals
from pd_cluster.simulate.simulated_layout import Simulated

Resource = Literal["prefill compute", "decode compute", "decode seats", "KV pool", "links", "scheduler"]
FULL = 0.95  # an instance is full if at least this share of its seats or blocks is taken
OFTEN = 0.3  # a resource is a bottleneck if it is full in at least this share of samples
BUSY = 0.9  # the scheduler is busy if it uses at least this share of a core
NUM_LONGEST = 10  # the fewest slow requests that are examined


def binding_resource(candidate: LayoutCandidate, costs: Costs, simulated: Simulated, goals: PlanGoals) -> Resource:
    """Returns the bottleneck of a load that misses, or nearly misses, its goals."""
    if scheduler_share(costs, simulated) >= BUSY:
        return "scheduler"
    ordered = sorted(simulated.outcomes, key=lambda each: -max(goals.ratios(each).values()))
    longest = ordered[: max(NUM_LONGEST, round((1 - goals.share) * len(ordered)))]
    worst = Counter(max(found, key=found.__getitem__) for each in longest if (found := goals.ratios(each)))
    full = _full(candidate, costs, simulated.samples)
    if worst and worst.most_common(1)[0][0] == "--slo-tpot":
        return "decode compute"
    if candidate.is_hybrid:
        return full or "prefill compute"
    before, after = _seconds(longest)
    return "prefill compute" if before >= after else full or "links"


def scheduler_share(costs: Costs, simulated: Simulated) -> float:
    """Returns the share of a core that the scheduler needs for routing and for one message per token."""
    num_messages = sum(each.num_output_tokens for each in simulated.outcomes)
    taken_s = len(simulated.outcomes) * costs.host.request_s + num_messages * costs.host.message_s
    return taken_s / simulated.duration_s if simulated.duration_s > 0 else 0.0


def _full(candidate: LayoutCandidate, costs: Costs, samples: Sequence[InstanceSample]) -> Resource | None:
    """Returns the resource of decoding instances that is full, blocks or seats; None if neither is."""
    seats = candidate.layout.max_num_seqs or costs.max_num_seqs
    decoding = [each for each in samples if each.role != "prefill"]
    if not decoding:
        return None
    of_blocks = sum(each.num_held_blocks >= FULL * each.num_blocks for each in decoding if each.num_blocks)
    of_seats = sum(each.num_running >= FULL * seats for each in decoding)
    if max(of_blocks, of_seats) < OFTEN * len(decoding):
        return None
    return "KV pool" if of_blocks >= of_seats else "decode seats"


def _seconds(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Sums the requests' seconds until their prompts were computed, and from then until their first tokens."""
    before = after = 0.0
    for each in outcomes:
        if each.ttft_s is not None and each.prefill_s is not None:
            before += each.prefill_s
            after += max(0.0, each.ttft_s - each.prefill_s)
    return before, after
