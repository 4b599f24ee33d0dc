"""Decides how many drafts a step verifies. Knows nothing of clocks or tokens."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import log
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pd_cluster.engine.draft.step_costs import NEVER, SIZES, StepCosts, index_of
from pd_cluster.types import Request

GAIN = 1.03  # drafts must promise sequences at least this many times their tokens per second without drafts
PRIOR = 1.0  # a drafter's usual chance weighs as much as this many verified drafts
KEPT = 0.95  # the weight of a sequence's earlier results after each step that verifies drafts
USUAL_CHANCES = {"prediction": 0.8, "forced": 0.9, "draft_model": 0.8}  # the chance that a draft is right, by drafter
USUAL_CHANCE = 0.5
USUAL_HIT_DECAY = 0.98  # like KEPT, for the results of all sequences together; used for drafters that cost time
FADING = 0.995  # the weight of earlier results when no draft pays, so that drafts are tried again later


class Guess(NamedTuple):
    """Drafts of one sequence, and the chance that the next draft is right."""

    drafter: str
    token_ids: Sequence[int]
    chance: float


class _Hits:
    """Results of one drafter for one sequence: accepted drafts, and first rejected drafts."""

    __slots__ = ("num_hits", "num_misses")

    def __init__(self) -> None:
        self.num_hits = self.num_misses = 0.0

    def fade(self, kept: float) -> None:
        self.num_hits *= kept
        self.num_misses *= kept

    def chance(self, usual: float) -> float:
        return (self.num_hits + PRIOR * usual) / (self.num_hits + self.num_misses + PRIOR)


class DraftSize:
    """Chooses the number of drafts that maximizes the geometric mean of the sequences' tokens per second.

    The sum would let sequences with likely drafts end early while all others slow down: then steps get fewer rows, but
    hardly shorter. A step with r further rows verifies the r drafts that raise the mean most. A sequence's j-th draft
    is right with the j-th power of its chance. Output does not depend on these estimates.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.costs_ahead = StepCosts()  # costs of steps that a device starts before the host has planned them
        self._usual: dict[str, _Hits] = {}  # by drafter, over all sequences; only drafters that cost time
        self._hits: WeakKeyDictionary[Request, dict[str, _Hits]] = WeakKeyDictionary()

    def chance(self, request: Request, drafter: str) -> float:
        """Returns the chance that this drafter's next draft for a sequence is right, from its results so far."""
        usual = USUAL_CHANCES.get(drafter, USUAL_CHANCE)
        if (of_all := self._usual.get(drafter)) is not None:
            usual = of_all.chance(usual)
        return self._hits_of(request, drafter).chance(usual)

    def _hits_of(self, request: Request, drafter: str) -> _Hits:
        return self._hits.setdefault(request, {}).setdefault(drafter, _Hits())

    def can_pay(self, num_rows: int, drafters: Mapping[Request, Sequence[str]], most_each: int, most: int) -> bool:
        """Whether drafts could speed up a step of `num_rows` if each sequence had drafts from its best drafter.

        If not, records that nothing was verified.
        """
        if not self.costs.knows(num_rows):
            return False
        gains: list[float] = []
        for request, names in drafters.items():
            chance = max(self.chance(request, name) for name in names)
            gains += _log_gains([chance] * most_each)
        gains.sort(reverse=True)
        if self._best(num_rows, gains[:most]):
            return True
        for request, names in drafters.items():
            for name in names:
                self._hits_of(request, name).fade(FADING)
        return False

    def choose(self, num_rows: int, guesses: Mapping[Request, Guess], most: int) -> dict[Request, int]:
        """Returns how many drafts each sequence of a step of `num_rows` verifies; sequences without drafts are absent.

        `most`: the limit for all sequences together.
        """
        gains: list[tuple[float, Request]] = []
        for request, guess in guesses.items():
            gains += [(gain, request) for gain in _log_gains([guess.chance] * len(guess.token_ids))]
        gains.sort(key=lambda each: each[0], reverse=True)
        num_verified = self._best(num_rows, [gain for gain, _ in gains[:most]])
        chosen: dict[Request, int] = {}
        for _, request in gains[:num_verified]:
            chosen[request] = chosen.get(request, 0) + 1
        for request, guess in guesses.items():
            if request not in chosen:
                self._hits_of(request, guess.drafter).fade(FADING)
        return chosen

    def _best(self, num_rows: int, gains: list[float]) -> int:
        """Returns how many further rows are best; `gains`, descending, has the logarithmic gain of each row."""
        if not self.costs.knows(num_rows):
            return 0  # the time without drafts is measured first
        plain_s, step_s = self._plain_s(num_rows), self.costs.estimates()
        best, best_gain = 0, log(GAIN)
        totals = [0.0, *accumulate(gains)]
        for at in range(index_of(num_rows), len(SIZES)):
            num_more = min(SIZES[at] - num_rows, len(gains))
            gain = totals[num_more] / num_rows - log(step_s[at] / plain_s)
            if num_more > 0 and gain > best_gain:
                best, best_gain = num_more, gain
            if num_more == len(gains):
                break
        return best

    def _plain_s(self, num_rows: int) -> float:
        """Returns the time of a step without drafts."""
        plain_s = self.costs.step_s(num_rows)
        return min(plain_s, self.costs_ahead.step_s(num_rows)) if self.costs_ahead.knows(num_rows) else plain_s

    def depth(self, requests: Sequence[Request], drafter: str, costs: StepCosts, num_rows: int, most: int) -> int:
        """Returns how many drafts for each sequence, at most `most`, are worth the time to make and verify them.

        `costs`: the time of one draft, by number of sequences. If that time is unknown, and drafts would pay if they
        took no time, returns 1 to measure it. The time is not assumed to be short, because a drafter
        may have many tokens to catch up with before its first draft.
        """
        num_seqs, plain_s = len(requests), self._plain_s(num_rows)
        usual = self._usual.setdefault(drafter, _Hits())
        draft_s = costs.step_s(num_seqs)
        if not (is_known := draft_s != NEVER):
            draft_s, most = 0.0, min(1, most)
        chances = [self.chance(request, drafter) for request in requests]
        best, best_gain, total = 0, log(GAIN), 0.0
        gains = [_log_gains([chance] * most) for chance in chances]
        for depth in range(1, most + 1):
            total += sum(each[depth - 1] for each in gains)
            step_s = self.costs.step_s(num_rows + num_seqs * depth) + depth * draft_s
            gain = total / num_rows - log(step_s / plain_s)
            if gain > best_gain:
                best, best_gain = depth, gain
        if not best:
            if is_known:
                costs.passed()
            usual.fade(FADING)
            for request in requests:
                self._hits_of(request, drafter).fade(FADING)
        return best

    def verified(self, request: Request, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Records how many of a sequence's drafts were right."""
        known = [(self._hits_of(request, drafter), KEPT)]
        if (of_all := self._usual.get(drafter)) is not None:
            known.append((of_all, USUAL_HIT_DECAY))
        for hits, kept in known:
            hits.fade(kept)
            hits.num_hits += num_accepted
            hits.num_misses += num_accepted < num_drafts


def _log_gains(chances: Sequence[float]) -> list[float]:
    """Returns by how much each draft of a sequence raises the logarithm of its expected tokens in the step.

    `chances`: of each draft, if all drafts before it are right.
    """
    expected = accumulate(accumulate(chances, operator.mul), initial=1.0)
    return [log(more) - log(less) for less, more in pairwise(expected)]
