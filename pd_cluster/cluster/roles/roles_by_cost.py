"""Decides by cost whether an instance changes its role: compares how splits would serve the last minute's arrivals.

Pure, except for the counters that it reads; the caller passes the time. Knows nothing of draining or of how a change is
carried out. The rules are in docs/protocol/membership.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.roles.auto_role import AutoRole, Decision, Flip, Held, Needy, RoleChooser
from pd_cluster.cluster.roles.role_costs import InstanceCost, RoleGoals, Split, best_split, instance_cost
from pd_cluster.cluster.roles.role_traffic import RoleTraffic, TrafficHistory, Waiting, Window, window_of
from pd_cluster.costs.linear_costs import StepWork
from pd_cluster.process_messages import Busy, Stats

NO_GOALS = RoleGoals()
LONGEST_ANSWER = 2.0  # the assumed length of an instance's longest remaining answer, as a multiple of the mean
STAYS: dict[Held, str] = {
    "silent": "no requests arrived in the last minute",
    "unmeasured": "no instance has measured its steps yet",
    "unsettled": "an instance is draining, leaving or changing its role",
    "new": "too few seconds have been measured",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRules:
    """`windows_s`: windows of arrivals, the longest first; a change may follow from any of them."""

    windows_s: tuple[float, ...] = (60.0, 30.0, 15.0)
    # safety margin in standard errors: a change must pay even if the need of the role that gains an instance is this
    # much lower than estimated, and the other role's this much higher
    noise: float = 2.0
    # replaces `noise` for a further change in the same direction within `onward_s`: the load has then certainly shifted
    onward_noise: float = 1.0
    onward_s: float = 120.0
    least_gain: float = 0.05  # the least gain for a change, as a share of the horizon's requests
    horizon_s: float = 300.0  # arrivals are expected to stay the same for this time
    sustain_s: float = 3.0  # every evaluation within this time must have favored the change
    return_s: float = 60.0  # the least time until the opposite change; doubles with each such change
    forget_s: float = 1800.0  # after this time without any change, the doubling starts again
    period_s: float = 1.0
    most_gap_s: float = 3.0  # the longest gap between two evaluations of one history


class RoleMembers(NamedTuple):
    """The instances that serve. `coming`: the numbers of other instances that will serve soon, by role."""

    serving: list[Instance]
    split: Split
    coming: Split
    is_settled: bool

    @classmethod
    def of(cls, instances: Sequence[Instance]) -> RoleMembers:
        serving = [each for each in instances if each.takes_requests and each.role != "encode"]
        coming = [each for each in instances if each.is_returning and each.service == "in" and each.next_role is None]
        is_settled = not any(
            each.service == "leaving" or each.next_role is not None or (each.service == "out" and not each.is_empty)
            for each in instances
        )
        return cls(serving, _split_of(serving), _split_of(coming), is_settled)

    @property
    def planned(self) -> Split:
        return Split(self.split.prefill + self.coming.prefill, self.split.decode + self.coming.decode)

    def givers(self, needy: Needy) -> list[Instance]:
        """Returns the instances that may change to this role.

        Members of a unit change together, and only by command.
        """
        role = "decode" if needy == "prefill" else "prefill"
        num = self.split.decode if needy == "prefill" else self.split.prefill
        return [each for each in self.serving if each.role == role and not each.unit] if num >= 2 else []


def _split_of(instances: Sequence[Instance]) -> Split:
    roles = [each.role for each in instances]
    return Split(roles.count("prefill"), roles.count("decode"))


class RolesByCost:
    """`--auto-role=cost`. `figures`: the counters and the work of all processes that serve requests."""

    def __init__(
        self,
        figures: Callable[[], tuple[Stats, Busy]],
        goals: RoleGoals = NO_GOALS,
        drain_timeout_s: float = math.inf,
        rules: CostRules | None = None,
    ) -> None:
        self.rules = rules or CostRules()
        self.period_s = self.rules.period_s
        self.last: Decision | None = None
        self._figures, self._goals, self._drain_timeout_s = figures, goals, drain_timeout_s
        self._history = TrafficHistory(self.rules.windows_s[0], self.rules.most_gap_s)
        self._cost: InstanceCost | None = None
        self._asked: tuple[Needy | None, float] = (None, 0.0)  # the role that every evaluation since then has favored
        self._seen_s = -math.inf
        self._flip: tuple[Needy | None, float] = (None, -math.inf)  # the last change, and its time
        self._num_returns = 0

    def observe(self, now_s: float, instances: Sequence[Instance]) -> Flip | None:
        """Evaluates the instances; called once a period. A returned change counts as made."""
        self._history.note(now_s, RoleTraffic.of(*self._figures()), instances)
        members = RoleMembers.of(instances)
        self.last = decision = self._decide(members)
        needy = decision.needy
        if needy != self._asked[0] or now_s - self._seen_s > self.rules.most_gap_s:
            self._asked = needy, now_s
        self._seen_s = now_s
        if needy is None or now_s - self._asked[1] < self.rules.sustain_s or not self._is_due(needy, now_s):
            return None
        giver = min(reversed(members.givers(needy)), key=lambda each: each.outstanding_tokens)
        return Flip(giver.name, needy, decision.why)

    def _is_due(self, needy: Needy, now_s: float) -> bool:
        """Whether a change to this role may be made now; each change back delays the next one longer."""
        role, at_s = self._flip
        is_back = role is not None and role != needy
        if now_s - at_s > self.rules.forget_s:
            self._num_returns = 0
        if is_back and now_s - at_s < self.rules.return_s * 2**self._num_returns:
            return False
        self._num_returns += is_back
        self._flip = needy, now_s
        self._asked = None, now_s
        return True

    def _decide(self, members: RoleMembers) -> Decision:
        waiting = Waiting.at(members.serving)
        if self._history.is_silent and waiting == Waiting(0, 0):
            return _stays("silent")
        cost = instance_cost(members.serving, self._cost)
        if cost is None:
            return _stays("unmeasured")
        self._cost = cost = cost if self._cost is None else self._cost.followed_by(cost)
        if not members.is_settled:
            return _stays("unsettled")
        stay = _stays("new")
        for window_s in reversed(self.rules.windows_s):
            found = self._judge_by(cost, window_s, waiting, members)
            if found is not None and found.needy is not None:
                doubted = cost.doubted(found.needy, self._goals)
                found = found if doubted is cost else self._judge_by(doubted, window_s, waiting, members)
            stay = found or stay
            if stay.needy is not None:
                return stay
        return stay

    def _judge_by(self, cost: InstanceCost, window_s: float, waiting: Waiting, members: RoleMembers) -> Decision | None:
        window = window_of(self._history, window_s, waiting, cost, self._goals)
        return None if window is None else self._judge(window, members, cost)

    def _judge(self, window: Window, members: RoleMembers, cost: InstanceCost) -> Decision:
        """Compares the present split with the split that is one step nearer to the best; allows for noise in the
        measurements.
        """
        model, need, split = window.model, window.need, members.planned
        served = model.served(need, split)
        words = f"prompts need {need.prefill:.2g} prefill instances and have {split.prefill}, "
        words += f"answers need {need.decode:.2g} decode instances and have {split.decode}"
        if served >= 1:
            return Decision("served", words)
        best = best_split(model, need, split)
        words += f": {100 * served:.0f} % are served within the objectives"
        if best.prefill == split.prefill:
            return Decision("best", f"{words}, and no other split serves more")
        needy: Needy = "prefill" if best.prefill > split.prefill else "decode"
        after = split.moved(needy)
        words += f", and {100 * model.served(need, after):.0f} % with {after.prefill} and {after.decode} instances"
        if not members.givers(needy):
            return Decision(
                "last", f"{words}, but no other instance may change: it is the last of its role, or in a unit"
            )
        if not self._leaves_enough(window, after, needy):
            return Decision("goals", f"{words}, but the remaining instances would miss the objectives")
        if self._gain(window, members, cost, needy) < self.rules.least_gain * self.rules.horizon_s:
            return Decision("unsure", f"{words}, but this gain does not exceed the cost of the drain and the noise")
        return Decision(needy, words)

    def _noise(self, needy: Needy) -> float:
        role, at_s = self._flip
        is_onward = role == needy and self._seen_s - at_s <= self.rules.onward_s
        return self.rules.onward_noise if is_onward else self.rules.noise

    def _leaves_enough(self, window: Window, after: Split, needy: Needy) -> bool:
        """Whether the remaining instances would meet the objectives, or at least be less loaded than the role that gets
        one more.
        """
        loads = window.model.loads(window.doubted(needy, self._noise(needy)), after)
        full, left = loads if needy == "prefill" else reversed(loads)
        return left <= max(1.0, full)

    def _gain(self, window: Window, members: RoleMembers, cost: InstanceCost, needy: Needy) -> float:
        """Returns how much more is served within the horizon if an instance changes its role, counting the drain.

        The result is in units of one second's arrivals.
        """
        model, split, horizon_s = window.model, members.planned, self.rules.horizon_s
        need = window.doubted(needy, self._noise(needy))
        drain_s = min(horizon_s, self._drain_s(window, members, cost, needy))
        during, after = (model.served(need, each) for each in (split.drained(needy), split.moved(needy)))
        return drain_s * during + (horizon_s - drain_s) * after - horizon_s * model.served(need, split)

    def _drain_s(self, window: Window, members: RoleMembers, cost: InstanceCost, needy: Needy) -> float:
        """Returns how long the giver takes to finish its work."""
        load = min(members.givers(needy), key=lambda each: each.outstanding_tokens).load
        if needy == "decode":
            took_s = window.model.token_s * load.num_queued_tokens
        elif num_rows := load.num_running + load.num_landing + load.num_waiting:
            step_s = cost.decode.seconds(StepWork(num_rows, round(num_rows * window.model.context)))
            took_s = LONGEST_ANSWER * window.model.answer_tokens * step_s / cost.tokens_per_step
        else:
            took_s = 0.0
        return min(took_s, self._drain_timeout_s)


def role_chooser(
    kind: str, figures: Callable[[], tuple[Stats, Busy]], goals: RoleGoals, drain_timeout_s: float
) -> RoleChooser | None:
    """Returns the chooser for a value of --auto-role; for "", roles change only by command."""
    if kind == "cost":
        return RolesByCost(figures, goals, drain_timeout_s)
    return AutoRole() if kind == "rules" else None


def _stays(verdict: Held) -> Decision:
    return Decision(verdict, STAYS[verdict])
