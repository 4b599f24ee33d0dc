"""Estimates how long clients wait for answers before they leave, and how long answers take. Uses no clock.

A request whose client will leave before its answer is better refused at once: under overload, all work would otherwise
be for clients that have left.
"""

from __future__ import annotations

import math
from array import array

FIRST_S, STEP, NUM_BINS = 0.05, 1.1, 120  # bins of waiting times: up to more than an hour
HALF_LIFE_S = 60.0
LEAST_LEFT = 8.0  # an estimate needs at least this number of clients that left
MOMENT_S = 0.1
FADE_S = 1.0  # the time between two reductions of old counts
LONGEST, SHORTEST = 4.0, 0.25  # bounds of an answer's expected time, as multiples of the mean

_LOG_STEP = math.log(STEP)


class AbandonmentTimes:
    """Estimates the time after which half of the clients have left (Kaplan and Meier, 1958); an answer ends the
    observation.

    So the estimate finds a client library's timeout of 10 s, whether it expires before the answer or during it. Users
    who stop one answer in ten hardly change the estimate.
    """

    def __init__(self) -> None:
        self._left, self._answered = (array("d", [0.0]) * NUM_BINS for _ in range(2))
        self._at_s = -math.inf
        self._found_s: float | None = None
        self.left_s = -math.inf  # when the last counted client left

    @property
    def num_left(self) -> float:
        return sum(self._left)

    @property
    def num_known(self) -> float:
        return self.num_left + sum(self._answered)

    def note(self, now_s: float, after_s: float, has_left: bool, weight: float = 1.0) -> None:
        """Records a request that was answered, or whose client left, `after_s` after its arrival."""
        self._fade(now_s)
        at = 0 if after_s <= FIRST_S else min(NUM_BINS - 1, int(math.log(after_s / FIRST_S) / _LOG_STEP))
        (self._left if has_left else self._answered)[at] += weight
        self._found_s = None

    def median_s(self, now_s: float) -> float:
        """Returns the estimate; inf if too few clients have left recently."""
        self._fade(now_s)
        if self._found_s is None:
            self._found_s = self._find_s()
        return self._found_s

    def _fade(self, now_s: float) -> None:
        took_s = now_s - self._at_s
        if took_s >= FADE_S:
            fade = 0.5 ** (took_s / HALF_LIFE_S)
            for counts in (self._left, self._answered):
                counts[:] = array("d", [each * fade for each in counts])
            self._at_s, self._found_s = now_s, None

    def _find_s(self) -> float:
        if self.num_left < LEAST_LEFT:
            return math.inf
        there, stay = self.num_known, 1.0
        for at, (left, answered) in enumerate(zip(self._left, self._answered, strict=True)):
            if left > 0.0:
                stay *= 1.0 - min(1.0, left / max(left, there - answered / 2))
                if stay < 0.5:
                    return FIRST_S * STEP**at
            there -= left + answered
        return math.inf


class AnswerTimes:
    """Mean time from a request's beginning to its end, and its mean number of tokens."""

    def __init__(self) -> None:
        self._number = self._took_s = self._num_tokens = 0.0
        self._at_s = -math.inf

    def note(self, now_s: float, took_s: float, num_tokens: int) -> None:
        fade = 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        self._number = self._number * fade + 1.0
        self._took_s = self._took_s * fade + took_s
        self._num_tokens = self._num_tokens * fade + num_tokens
        self._at_s = now_s

    def expected_s(self, num_tokens: int) -> float:
        """Returns how long a request of `num_tokens` would take once it has begun; 0: unknown."""
        if not self._number:
            return 0.0
        relative = num_tokens * self._number / self._num_tokens if self._num_tokens else 1.0
        return self._took_s / self._number * min(LONGEST, max(SHORTEST, relative))


class Abandonment:
    """`everybody`: the times of all clients, for clients without enough data of their own; no client dominates it."""

    def __init__(self) -> None:
        self.everybody = AbandonmentTimes()
        self.answers = AnswerTimes()

    def note(self, own: AbandonmentTimes, now_s: float, after_s: float, has_left: bool) -> None:
        """Records a request. Several that leave within MOMENT_S count as one: their program has ended."""
        if has_left:
            if now_s - own.left_s < MOMENT_S:
                return
            own.left_s = now_s
        own.note(now_s, after_s, has_left)
        self.everybody.note(now_s, after_s, has_left, 1.0 / max(1.0, own.num_known / LEAST_LEFT))

    def abandon_after_s(self, own: AbandonmentTimes, now_s: float) -> float:
        """Returns the time that a request of this client may take, waiting included."""
        return (own if own.num_known >= LEAST_LEFT else self.everybody).median_s(now_s)

    def most_wait_s(self, own: AbandonmentTimes, num_tokens: int, now_s: float) -> float:
        """Returns how long a request may wait and still be answered in time; inf: its client is expected to stay."""
        abandon_after_s = self.abandon_after_s(own, now_s)
        if abandon_after_s == math.inf:
            return math.inf
        return max(abandon_after_s / 10, abandon_after_s - self.answers.expected_s(num_tokens))
