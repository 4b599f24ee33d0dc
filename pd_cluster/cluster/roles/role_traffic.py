"""Derives the work of the last minute from counters that only grow. Pure; the caller passes the time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, get_args

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.roles.role_costs import CLEAR_S, InstanceCost, RoleGoals, RoleModel, RoleNeed, Work
from pd_cluster.process_messages import Busy, Stats
from pd_cluster.types import FinishReason, Role
from pd_cluster.wire import Load

FIRST_ANSWER_TOKENS = 256.0  # the expected length of an answer before any has ended; few reach their limit
ENDED = tuple(f"finished_{reason}" for reason in get_args(FinishReason))


class RoleTraffic(NamedTuple):
    """Counters since the start, over all API processes; `num_queued` requests wait for admission right now."""

    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0  # pairs of a prompt's token and an earlier one
    num_answers: int = 0  # requested sequences
    num_max_tokens: int = 0  # maximum tokens of these sequences
    num_cached: int = 0  # cached tokens of started prompts
    num_computed: int = 0
    num_generated: int = 0
    num_ended: int = 0  # ended answers
    num_queued: int = 0

    @classmethod
    def of(cls, stats: Stats, busy: Busy) -> RoleTraffic:
        counts = stats.counters
        return cls(
            counts.get("arrived_requests", 0),
            counts.get("arrived_prompt_tokens", 0),
            counts.get("arrived_prompt_pairs", 0),
            counts.get("arrived_answers", 0),
            counts.get("arrived_max_tokens", 0),
            counts.get("prompt_tokens_cached", 0),
            counts.get("prompt_tokens_computed", 0),
            counts.get("generation_tokens", 0),
            sum(counts.get(name, 0) for name in ENDED),
            busy.num_waiting,
        )


class Waiting(NamedTuple):
    """Work that waits at instances: tokens of prompts to compute, and requests without a seat to decode in."""

    num_prompt_tokens: int
    num_answers: int

    @classmethod
    def at(cls, instances: Sequence[Instance]) -> Waiting:
        """Counts waiting work. Prompts that only wait until decode instances have room count as waiting for decode."""
        prefills = [each.load for each in instances if each.role == "prefill"]
        decodes = [each.load for each in instances if each.role == "decode"]
        num_tokens = sum(load.num_queued_tokens for load in prefills if not _is_held_up(load))
        num_prompts = sum(load.num_waiting + load.num_running for load in prefills)
        return cls(num_tokens, max(num_prompts, sum(load.num_waiting for load in decodes)))


def _is_held_up(load: Load) -> bool:
    return bool(load.num_waiting and load.num_exporting and not load.num_running)


class Window(NamedTuple):
    """The need of each role within one window of time.

    `arrivals`: the instances that the arriving work keeps busy; `errors`: the standard errors of these numbers, as
    shares.
    `waiting`: the instances needed for waiting work.
    """

    model: RoleModel
    arrivals: RoleNeed
    errors: RoleNeed
    waiting: RoleNeed

    @property
    def need(self) -> RoleNeed:
        return _sum(self.arrivals, self.waiting)

    def doubted(self, needy: Role, noise: float) -> RoleNeed:
        """Returns a cautious need: `noise` standard errors lower for this role, and higher for the other."""
        signs = (-1, 1) if needy == "prefill" else (1, -1)
        factors = (max(0.0, 1 + sign * noise * error) for sign, error in zip(signs, self.errors, strict=True))
        return _sum(RoleNeed(*(each * by for each, by in zip(self.arrivals, factors, strict=True))), self.waiting)


def _sum(one: RoleNeed, other: RoleNeed) -> RoleNeed:
    return RoleNeed(one.prefill + other.prefill, one.decode + other.decode)


class _TrafficReading(NamedTuple):
    at_s: float
    traffic: RoleTraffic
    num_own_tokens: int  # outstanding tokens of this scheduler's requests, summed over all readings
    num_all_tokens: int  # the same for all schedulers' requests


class TrafficHistory:
    """Readings of the last `longest_s`. After a gap between readings, a new history begins."""

    def __init__(self, longest_s: float, most_gap_s: float) -> None:
        self._longest_s, self._most_gap_s = longest_s, most_gap_s
        self._readings: deque[_TrafficReading] = deque()
        self._answer_tokens = 0.0  # mean of the last answers that ended; 0: none yet
        self._usual = Work()  # the work that arrived last: describes waiting work when nothing arrives

    def note(self, at_s: float, traffic: RoleTraffic, instances: Sequence[Instance]) -> None:
        readings = self._readings
        if readings and at_s - readings[-1].at_s > self._most_gap_s:
            readings.clear()
        own = sum(each.outstanding_tokens for each in instances)
        others = sum(each.others_tokens for each in instances)
        *_, own_before, all_before = readings[-1] if readings else (0, 0)
        readings.append(_TrafficReading(at_s, traffic, own_before + own, all_before + own + others))
        while len(readings) > 1 and at_s - readings[1].at_s >= self._longest_s:
            readings.popleft()

    @property
    def is_silent(self) -> bool:
        """Whether nothing has arrived in the whole history, and no request waits for admission."""
        first, last = self._readings[0].traffic, self._readings[-1].traffic
        return last.num_prompts == first.num_prompts and not last.num_queued

    @property
    def num_queued(self) -> int:
        return self._readings[-1].traffic.num_queued

    @property
    def usual(self) -> Work:
        return self._usual

    def work(self, window_s: float) -> tuple[Work, RoleNeed] | None:
        """Returns the work that arrived per second, and its standard errors as shares.

        Returns None if the history is too short.
        """
        last = self._readings[-1]
        first = next((each for each in reversed(self._readings) if last.at_s - each.at_s >= window_s), None)
        if first is None:
            return None
        come = RoleTraffic(*(now - then for now, then in zip(last.traffic, first.traffic, strict=True)))
        share = self._others_share() / (last.at_s - first.at_s)
        missed = 1 - self._hit_share()
        tokens = self._mean_answer(come, window_s) * come.num_answers
        work = Work(
            come.num_prompts * share,
            come.num_prompt_tokens * missed * share,
            # a prefix that is a share h of a prompt has a share h * h of its pairs
            come.num_prompt_pairs * missed * (2 - missed) * share,
            come.num_answers * share,
            tokens * share,
        )
        if come.num_prompts:
            self._usual = work
        return work, _errors(come)

    def _hit_share(self) -> float:
        first, last = self._readings[0].traffic, self._readings[-1].traffic
        cached, computed = last.num_cached - first.num_cached, last.num_computed - first.num_computed
        return cached / (cached + computed) if cached + computed else 0.0

    def _others_share(self) -> float:
        """Returns the outstanding tokens of all schedulers, divided by those of this scheduler, whose counters cover
        only its own requests.
        """
        first, last = self._readings[0], self._readings[-1]
        own = last.num_own_tokens - first.num_own_tokens
        return (last.num_all_tokens - first.num_all_tokens) / own if own else 1.0

    def _mean_answer(self, come: RoleTraffic, window_s: float) -> float:
        """Returns the expected length of an answer: all generated tokens, divided by the number of ended answers.

        The earlier mean counts as one more answer, so that the result stays the same while no answer ends.
        """
        most = come.num_max_tokens / come.num_answers if come.num_answers else math.inf
        known = self._answer_tokens or min(most, FIRST_ANSWER_TOKENS)
        mean = (come.num_generated + known) / (come.num_ended + 1)
        if window_s >= self._longest_s and come.num_ended:
            self._answer_tokens = mean
        return min(most, mean)


def _errors(come: RoleTraffic) -> RoleNeed:
    """Returns the standard errors of each role's work, as shares, for requests that arrive at random (Poisson).

    A prompt's work is its number of tokens; lengths of answers are assumed to be exponentially distributed.
    """
    if not come.num_prompt_tokens:
        return RoleNeed(0.0, 0.0)
    squares = 2 * come.num_prompt_pairs + come.num_prompt_tokens
    answers = 2 / come.num_answers + 1 / max(1, come.num_ended) if come.num_answers else 0.0
    return RoleNeed(math.sqrt(squares) / come.num_prompt_tokens, math.sqrt(answers))


def window_of(
    history: TrafficHistory, window_s: float, waiting: Waiting, cost: InstanceCost, goals: RoleGoals
) -> Window | None:
    """Returns the need within one window; None while the history is shorter than the window."""
    found = history.work(window_s)
    if found is None:
        return None
    work, errors = found
    usual = history.usual
    model = RoleModel.of(usual, cost, goals)
    num_prompts, num_answers = history.num_queued, history.num_queued + waiting.num_answers
    prompt_s = model.prompt_s * num_prompts + model.token_s * waiting.num_prompt_tokens
    answer_s = usual.num_answer_tokens / max(1e-9, usual.num_prompts) * num_answers / model.answer_tokens_per_s
    return Window(model, model.need(work), errors, RoleNeed(prompt_s / CLEAR_S, answer_s / CLEAR_S))
