"""Estimates a candidate's strain from rates alone, within microseconds, to choose which candidates to simulate.

Each instance is modelled as a queue with constant service times (M/D/1); decode instances have as many rows as their
tokens per second require. Ignores bursts, prefix caches and routing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs, StepWork
from pd_cluster.plan.candidate_runs import rate_per_s
from pd_cluster.plan.layout_candidates import LayoutCandidate
from pd_cluster.plan.plan_goals import PlanGoals

OVERLOADED = 1e3  # the strain of an overloaded candidate is this times its load; other candidates have less


@dataclass(frozen=True, slots=True)
class MeanLoad:
    """The means of a trace."""

    rate_per_s: float
    num_prompt_tokens: float
    num_output_tokens: float

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> MeanLoad:
        num = max(1, len(arrivals))
        prompt = sum(each.num_prompt_tokens for each in arrivals) / num
        return cls(rate_per_s(arrivals), prompt, sum(each.num_output_tokens for each in arrivals) / num)

    @property
    def num_context_tokens(self) -> float:
        """Returns a request's mean number of tokens while it decodes: its prompt and half of its answer."""
        return self.num_prompt_tokens + self.num_output_tokens / 2


def estimated_strain(candidate: LayoutCandidate, costs: Costs, load: MeanLoad, goals: PlanGoals) -> float:
    """Returns the strain to sort by. If it is OVERLOADED or more, the candidate cannot keep up."""
    layout = candidate.layout
    num_prefill, num_decode = layout.num_prefill or layout.num_hybrid, layout.num_decode or layout.num_hybrid
    chunk = layout.max_num_batched_tokens or costs.max_num_batched_tokens
    prompt_s = prompt_seconds(costs, load.num_prompt_tokens, chunk)
    busy = load.rate_per_s * prompt_s / num_prefill
    left = 1 - busy if candidate.is_hybrid else 1.0  # the share of an instance's time that is left for decoding
    rows = rows_needed(costs, load, load.rate_per_s * load.num_output_tokens / num_decode, max(left, 1e-9))
    num_blocks = layout.num_blocks or costs.num_blocks
    capacity = min(layout.max_num_seqs or costs.max_num_seqs, num_blocks * costs.block_size / load.num_context_tokens)
    overload = max(busy, rows / capacity)
    if overload >= 1:
        return OVERLOADED * overload
    ttft_s = prompt_s * (1 + busy / (2 * (1 - busy)))
    if not candidate.is_hybrid:
        ttft_s += costs.handover.seconds(round(load.num_prompt_tokens * costs.kv_token_nbytes))
    tpot_s = row_step_seconds(costs, rows, load.num_context_tokens) / left
    slo = goals.slo
    found = [(ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s), (ttft_s + tpot_s * load.num_output_tokens, slo.e2e_s)]
    return max(taken / goal for taken, goal in found if goal)


def prompt_seconds(costs: Costs, num_tokens: float, chunk: int) -> float:
    """Returns the time to compute a prompt if nothing else runs."""
    num_steps, whole = math.ceil(num_tokens / chunk), round(num_tokens)
    work = StepWork(num_prompt_tokens=whole, num_prompt_pairs=whole * (whole + 1) // 2)
    step = costs.step
    more_s = max(0.0, step.step_s - step.num_flat_rows * step.prompt_token_s)  # cost of one more step for these tokens
    return step.seconds(work) + (num_steps - 1) * more_s + num_steps * costs.host.step_s


def row_step_seconds(costs: Costs, rows: float, num_context_tokens: float) -> float:
    """Returns the time of a step with this many rows."""
    step = costs.step
    of_rows = step.row_s * max(0.0, rows - step.num_flat_rows) + step.context_token_s * rows * num_context_tokens
    return step.step_s + costs.host.step_s + of_rows


def rows_needed(costs: Costs, load: MeanLoad, tokens_per_s: float, left: float) -> float:
    """Returns how many rows an instance needs to decode this many tokens per second; may be infinite.

    `left`: the share of the instance's time that is left for decoding.
    """
    low, high = 0.0, float(1 << 20)
    if tokens_per_s * row_step_seconds(costs, high, load.num_context_tokens) > high * left:
        return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        enough = middle * left >= tokens_per_s * row_step_seconds(costs, middle, load.num_context_tokens)
        low, high = (low, middle) if enough else (middle, high)
    return high
