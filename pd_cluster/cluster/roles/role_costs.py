"""Determines the split of instances between prefill and decode that serves the arriving requests best. Pure arithmetic.

Work is measured in instances: a need of 2.5 keeps two and a half instances busy. Knows nothing of where the counts come
from or of how a role changes. The rules are in docs/protocol/membership.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.costs.linear_costs import StepCost, StepWork
from pd_cluster.types import Role

USUAL_STEP_TOKENS = 2048  # tokens of waiting prompts in one step
USUAL_SEQS = 256
LEAST_STEP_S = 1e-6
NEW_SHARE = 0.1  # the weight of the newest measurements in the costs
A_PROMPT = StepWork(num_prompt_tokens=1, num_prompt_pairs=1)
A_TOKEN = StepWork(num_rows=1, num_context_tokens=1)
BUSY_SHARE = 0.85  # how busy a prefill instance may be if no objective limits how long a prompt may wait
LEAST_BUSY_SHARE = 0.5  # a role may always be this busy
WAIT_TAIL = 2.0  # nearly all waits stay below this multiple of the mean wait
CLEAR_S = 60.0  # waiting work should be served within this time, in addition to arrivals


class RoleGoals(NamedTuple):
    """The objectives of `--slo-ttft` and `--slo-tpot`; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class InstanceCost(NamedTuple):
    """An instance's capacity: the cost of its steps in each role, its slots, and its pool in tokens; 0: unknown."""

    prefill: StepCost
    decode: StepCost
    decode_step_s: float = 0.0  # the time of a current decode step
    num_seqs: int = 0
    num_cache_tokens: int = 0
    tokens_per_step: float = 1.0

    def followed_by(self, new: InstanceCost) -> InstanceCost:
        """Returns a weighted average of this cost and the new one, so that a slow moment of a machine counts little."""
        left = 1 - NEW_SHARE
        return new._replace(
            prefill=_weighted([(left, self.prefill), (NEW_SHARE, new.prefill)]),
            decode=_weighted([(left, self.decode), (NEW_SHARE, new.decode)]),
            decode_step_s=left * self.decode_step_s + NEW_SHARE * new.decode_step_s,
        )

    def doubted(self, needy: Role, goals: RoleGoals) -> InstanceCost:
        """Returns the cost with which to check whether the needy role really has too few instances.

        The estimate for decode steps of more sequences may be too high. If the current steps meet the objective, the
        result therefore assumes that steps with any number of sequences take as long as the current ones. So decode
        instances count as too few only if their current steps exceed the objective, or if they have too few seats.
        """
        is_fine = self.decode_step_s and self.decode_step_s <= (goals.tpot_s or math.inf) * self.tokens_per_step
        return self._replace(decode=StepCost(step_s=self.decode_step_s)) if needy == "decode" and is_fine else self


class Work(NamedTuple):
    """Requests in total, with the sums of their sizes. `num_prompt_tokens` and `num_prompt_pairs` exclude cached
    tokens.
    """

    num_prompts: float = 0.0
    num_prompt_tokens: float = 0.0
    num_prompt_pairs: float = 0.0  # pairs of a prompt's token and an earlier one
    num_answers: float = 0.0
    num_answer_tokens: float = 0.0


class RoleNeed(NamedTuple):
    """The number of instances that each role's work keeps busy."""

    prefill: float
    decode: float


class Split(NamedTuple):
    """The number of instances of each role."""

    prefill: int
    decode: int

    def moved(self, needy: Role) -> Split:
        """Returns the split after one instance has changed to this role."""
        change = 1 if needy == "prefill" else -1
        return Split(self.prefill + change, self.decode - change)

    def drained(self, needy: Role) -> Split:
        """Returns the split while the instance that will change to this role drains."""
        return Split(self.prefill - (needy == "decode"), self.decode - (needy == "prefill"))


def instance_cost(instances: Sequence[Instance], known: InstanceCost | None = None) -> InstanceCost | None:
    """Returns the mean cost of these instances; None if none has measured its steps.

    Each role's measurements come from its own instances; without any, from `known`, or from other instances.
    """
    found = [(each.role, each.load.step_cost) for each in instances]
    prefill = _mean_of([(role == "prefill", cost) for role, cost in found if cost.seconds(A_PROMPT) > cost.step_s])
    decode = _mean_of([(role == "decode", cost) for role, cost in found if cost.seconds(A_TOKEN)])
    if known is not None:
        prefill, decode = prefill or known.prefill, decode or known.decode
    if prefill is None or decode is None:
        return None
    sizes = [each.load.num_blocks * _block_size(each) for each in instances]
    loads = [each.load for each in instances if each.role == "decode" and each.load.decode_work.num_rows]
    return InstanceCost(
        prefill,
        decode,
        sum(load.decode_step_s for load in loads) / max(1, len(loads)),
        min((each.num_slots for each in instances if each.num_slots), default=0),
        min((size for size in sizes if size), default=0),
        sum(load.tokens_per_step for load in loads) / len(loads) if loads else 1.0,
    )


def _mean_of(found: Sequence[tuple[bool, StepCost]]) -> StepCost | None:
    """Returns the mean over instances of the role, or over all if there are none."""
    costs = [cost for is_own, cost in found if is_own] or [cost for _, cost in found]
    if not costs:
        return None
    return _weighted([(1 / len(costs), cost) for cost in costs])


def _weighted(costs: Sequence[tuple[float, StepCost]]) -> StepCost:
    names = [name for name in StepCost.__struct_fields__ if name != "num_flat_rows"]
    means = {name: sum(weight * getattr(cost, name) for weight, cost in costs) for name in names}
    return StepCost(**means, num_flat_rows=min(cost.num_flat_rows for _, cost in costs))


def _block_size(instance: Instance) -> int:
    layout = instance.info.layout if instance.info is not None else None
    return layout.block_size if layout is not None else 0


@dataclass(frozen=True, slots=True)
class RoleModel:
    """An instance's cost for requests of one kind, and how busy a role may be under the objectives."""

    goals: RoleGoals
    prefill: StepCost
    prompt_s: float  # an instance's seconds for a mean prompt
    token_s: float  # an instance's seconds for one token of it
    context: float  # tokens that a step of an answer attends to
    answer_tokens: float  # mean tokens of an answer
    num_seats: int  # sequences that an instance decodes at a time, within memory and objective
    answer_tokens_per_s: float  # the rate of an instance with all seats taken

    @classmethod
    def of(cls, usual: Work, cost: InstanceCost, goals: RoleGoals) -> RoleModel:
        """Makes the model from `usual`, requests of this kind; only their means count."""
        num_prompts, num_answers = usual.num_prompts or 1.0, usual.num_answers or 1.0
        answer_tokens = usual.num_answer_tokens / num_answers
        context = usual.num_prompt_tokens / num_prompts + answer_tokens / 2
        seats = _num_seats(cost, round(context), goals.tpot_s)
        step_s = max(LEAST_STEP_S, cost.decode.seconds(StepWork(seats, round(seats * context))))
        rate = seats * cost.tokens_per_step / step_s
        whole_s = prompt_seconds(cost.prefill, usual)
        token_s = whole_s / usual.num_prompt_tokens if usual.num_prompt_tokens else cost.prefill.prompt_token_s
        return cls(goals, cost.prefill, whole_s / num_prompts, token_s, context, answer_tokens, seats, rate)

    def need(self, work: Work) -> RoleNeed:
        """Returns the instance-seconds of this work."""
        return RoleNeed(prompt_seconds(self.prefill, work), work.num_answer_tokens / self.answer_tokens_per_s)

    def loads(self, need: RoleNeed, split: Split) -> RoleNeed:
        """Returns how busy each role would be; 1: at its limit."""
        return RoleNeed(
            _load(need.prefill, split.prefill, self._prefill_share(split.prefill)),
            _load(need.decode, split.decode, self._decode_share(split.decode)),
        )

    def served(self, need: RoleNeed, split: Split) -> float:
        """Returns the share of the need that is served within the objectives."""
        return 1 / max(1.0, *self.loads(need, split))

    def _prefill_share(self, num: int) -> float:
        """Returns how busy prefill may be if nearly all prompts are to meet their objective (Sakasegawa's
        formula for waits in an M/M/c queue).
        """
        slack_s = self.goals.ttft_s - self.prompt_s - self.prefill.step_s
        if not self.goals.ttft_s or not self.prompt_s or not num:
            return BUSY_SHARE
        power = math.sqrt(2 * (num + 1)) - 1
        low, high = LEAST_BUSY_SHARE, 0.99
        for _ in range(8):
            share = (low + high) / 2
            if WAIT_TAIL * self.prompt_s * share**power / (num * (1 - share)) <= slack_s:
                low = share
            else:
                high = share
        return low

    def _decode_share(self, num: int) -> float:
        """Returns the share of seats that may be taken, which leaves room for the variation of a Poisson load."""
        return max(LEAST_BUSY_SHARE, 1 - 1 / math.sqrt(max(1, num * self.num_seats)))


def prompt_seconds(cost: StepCost, work: Work) -> float:
    """Returns an instance's seconds for these prompts, with full steps."""
    token_s = cost.prompt_token_s + cost.step_s / USUAL_STEP_TOKENS
    return token_s * work.num_prompt_tokens + cost.prompt_pair_s * work.num_prompt_pairs


def _load(need: float, num: int, share: float) -> float:
    if num <= 0:
        return math.inf if need else 0.0
    return need / (num * share)


def _num_seats(cost: InstanceCost, context: int, tpot_s: float) -> int:
    """Returns how many sequences of this context an instance decodes at a time. Ignores the objective if even a single
    sequence misses it.
    """
    most = cost.num_seqs or USUAL_SEQS
    if cost.num_cache_tokens:
        most = max(1, min(most, cost.num_cache_tokens // max(1, context)))
    goal_s = tpot_s * cost.tokens_per_step
    if not goal_s or cost.decode.seconds(StepWork(1, context)) > goal_s:
        return most
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.decode.seconds(StepWork(middle, middle * context)) <= goal_s:
            low = middle
        else:
            high = middle - 1
    return low


def best_split(model: RoleModel, need: RoleNeed, present: Split) -> Split:
    """Returns the split with the same total that serves the most work; among equals, the nearest to the present one."""
    num = sum(present)
    splits = [Split(at, num - at) for at in range(1, num)] or [present]
    return max(splits, key=lambda each: (round(model.served(need, each), 3), -abs(each.prefill - present.prefill)))
