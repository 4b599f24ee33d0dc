"""Decides whether an instance should change its role, from the load of each role. Pure: integers, an injected clock.

Knows nothing of draining or of how a change is carried out. The thresholds are in docs/protocol/membership.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.types import Role

Needy = Literal["prefill", "decode"]
Held = Literal["silent", "unmeasured", "unsettled", "new", "served", "best", "last", "goals", "unsure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The thresholds. A load of 1 is the intended load of a role.

    `low` is far below `high`, so that one change does not cause the opposite one.
    """

    num_prompts: int = 4  # prompts per prefill instance, waiting or being computed
    num_waiting: int = 4  # waiting requests per decode instance
    num_running: int = 64  # running sequences per decode instance
    high: float = 1.0
    low: float = 0.5
    sustain_s: float = 10.0
    cooldown_s: float = 60.0
    period_s: float = 1.0  # between two samples
    most_gap_s: float = 3.0  # the longest gap between two samples of one history


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """An instance that takes requests, at one moment."""

    name: str
    role: Role
    num_waiting: int
    num_running: int
    held_share: float = 0.0  # share of its KV blocks that requests hold
    num_exporting: int = 0
    outstanding_tokens: int = 0
    is_in_unit: bool = False

    @property
    def num_prompts(self) -> int:
        """Counts a prefill instance's prompts. A decode instance waits for each of them."""
        return self.num_waiting + self.num_running

    @property
    def is_held_up(self) -> bool:
        """Whether a prefill instance has prompts but computes none, because exports wait for decode instances."""
        return bool(self.num_waiting and self.num_exporting and not self.num_running)

    @classmethod
    def of(cls, instance: Instance) -> InstanceReading:
        load = instance.load
        held_share = load.num_held_blocks / max(1, load.num_blocks)
        return cls(
            instance.name,
            instance.role,
            load.num_waiting,
            load.num_running,
            held_share,
            load.num_exporting,
            instance.outstanding_tokens,
            bool(instance.unit),
        )


@dataclass(frozen=True, slots=True)
class RoleSample:
    """`instances` are in the table's order; `is_settled`: no instance is about to leave its role."""

    at_s: float
    instances: tuple[InstanceReading, ...]
    is_settled: bool = True

    @classmethod
    def of(cls, at_s: float, instances: Sequence[Instance]) -> RoleSample:
        is_settled = not any(
            each.service == "leaving" or each.next_role is not None or (each.service == "out" and not each.is_empty)
            for each in instances
        )
        return cls(at_s, tuple(InstanceReading.of(each) for each in instances if each.takes_requests), is_settled)


@dataclass(frozen=True, slots=True)
class Flip:
    name: str
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one evaluation. `verdict`: the role that needs an instance, or why no role changes."""

    verdict: Held | Needy
    why: str

    @property
    def needy(self) -> Needy | None:
        return self.verdict if self.verdict == "prefill" or self.verdict == "decode" else None


class RoleChooser(Protocol):
    """`--auto-role`: by rules, or by cost (roles_by_cost.py)."""

    @property
    def period_s(self) -> float:
        """The time between two evaluations."""

    @property
    def last(self) -> Decision | None:
        """The outcome of the last evaluation; None: not available."""

    def observe(self, now_s: float, instances: Sequence[Instance]) -> Flip | None:
        """Evaluates the instances; called once a period. A returned change counts as made."""


def busy(sample: RoleSample, role: Role, rules: Rules, num_fewer: int = 0) -> float:
    """Returns the load that a role has, or would have with `num_fewer` fewer instances; 1 is the intended load."""
    seen = [each for each in sample.instances if each.role == role]
    num = max(1, len(seen) - num_fewer)
    if role == "prefill":
        return sum(each.num_prompts for each in seen if not each.is_held_up) / (rules.num_prompts * num)
    num_prompts = sum(each.num_prompts for each in sample.instances if each.role == "prefill")
    num_waiting = max(0, sum(each.num_waiting for each in seen) - num_prompts)  # without those waiting for prefill
    num_running = sum(each.num_running for each in seen)
    held = sum(each.held_share for each in seen) / num
    return max(held, num_waiting / (rules.num_waiting * num), num_running / (rules.num_running * num))


def decide(history: Sequence[RoleSample], last_flip_s: float, rules: Rules) -> Flip | None:
    """Returns the change to make now; `history` is oldest first. `last_flip_s`: time of the last requested change."""
    if not history or history[-1].at_s - last_flip_s < rules.cooldown_s:
        return None
    pairs: list[tuple[Role, Role]] = [("prefill", "decode"), ("decode", "prefill")]
    for needy, giver in pairs:
        if _sustained(history, needy, giver, rules):
            givers = [each for each in history[-1].instances if each.role == giver and not each.is_in_unit]
            chosen = min(reversed(givers), key=lambda each: each.outstanding_tokens)
            now = history[-1]
            why = (
                f"{needy} is at {busy(now, needy, rules):.1f} of its capacity, {giver} at {busy(now, giver, rules):.1f}"
            )
            return Flip(chosen.name, needy, why)
    return None


def _sustained(history: Sequence[RoleSample], needy: Role, giver: Role, rules: Rules) -> bool:
    """Whether every sample of the last `sustain_s` calls for this change, with no gap between samples."""
    later_s = history[-1].at_s
    for sample in reversed(history):
        if later_s - sample.at_s > rules.most_gap_s or not _asks(sample, needy, giver, rules):
            return False
        if history[-1].at_s - sample.at_s >= rules.sustain_s:
            return True
        later_s = sample.at_s
    return False


def _asks(sample: RoleSample, needy: Role, giver: Role, rules: Rules) -> bool:
    givers = [each for each in sample.instances if each.role == giver]
    return (
        sample.is_settled
        and len(givers) >= 2
        # members of a unit change their role together, and only by command
        and not all(each.is_in_unit for each in givers)
        and busy(sample, needy, rules) >= rules.high
        and busy(sample, giver, rules, num_fewer=1) <= rules.low
    )


class AutoRole:
    """`--auto-role=rules`: keeps the history that `decide` needs."""

    last: Decision | None = None

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.period_s = self.rules.period_s
        self._history: deque[RoleSample] = deque(maxlen=int(2 * self.rules.sustain_s / self.rules.period_s) + 2)
        self._last_flip_s = float("-inf")

    def observe(self, now_s: float, instances: Sequence[Instance]) -> Flip | None:
        """Takes a sample; called once a period. A returned change counts as made."""
        self._history.append(RoleSample.of(now_s, instances))
        flip = decide(self._history, self._last_flip_s, self.rules)
        if flip is not None:
            self._last_flip_s = now_s
        return flip
