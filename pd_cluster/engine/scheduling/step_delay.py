"""Decides when a decode step waits for sequences: for one that joins soon, or for many if no answer is needed early.

A step's cost is reading the weights, plus a part per sequence. Waiting pays if prefill computes on the same cores,
which the caller determines: a separate device would only idle. It has no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pd_cluster.engine.scheduling.scheduler import StepScheduler

MAX_INCOMING = 2  # incoming requests per running sequence; with more of them, a step waits
MAX_LANDING_DELAY_SHARE = 0.25  # the longest delay for a landing, as a share of a step; less with many sequences
MAX_LANDING_DELAY_S = 0.02  # the longest such delay in seconds: only a token and two messages are missing
MAX_WAIT_S = 2.0  # maximum time since the last landing; then steps continue without delay until the next


class PendingLandings(Protocol):
    """The part of imports that StepDelay needs."""

    num_landings: int

    def num_incoming(self, batch: str) -> int: ...


class StepDelay:
    """Delays steps while many known sequences are not running yet; the fewer run, the more a delay pays.

    Near the end of a batch few are still incoming, so no step waits then, and the last answer is hardly delayed.
    """

    def __init__(self, scheduler: StepScheduler, coming: PendingLandings, clock: Callable[[], float]) -> None:
        self._scheduler, self._coming, self._clock = scheduler, coming, clock
        self._num_landings, self._landed_s = coming.num_landings, float("-inf")

    @property
    def waits(self) -> bool:
        """Whether the next step waits. It never does with prompts, several batches, no batch, or missing blocks."""
        if self._coming.num_landings != self._num_landings:
            self._num_landings, self._landed_s = self._coming.num_landings, self._clock()
        running = self._scheduler.running
        if not running or not (batch := running[0].batch) or self._scheduler.waiting:
            return False
        if self._clock() - self._landed_s > MAX_WAIT_S:
            return False
        if self._coming.num_incoming(batch) <= MAX_INCOMING * len(running):
            return False
        return all(request.batch == batch and request.num_behind == 1 for request in running)


class ExpectedLanding(Protocol):
    """The part of imports that LandingWait needs."""

    @property
    def imminent_s(self) -> float | None: ...

    def mark_late(self) -> None: ...


class LandingWait:
    """Delays a step a little, so that a sequence whose KV cache has already arrived takes part in it.

    Otherwise the sequence gets its second token after the rest of the delay, this step and the next one. So it gains at
    most a step, and the running ones together lose no more. A step that would have to wait longer begins at once. No
    two steps wait for the same transfer.
    """

    def __init__(self, imports: ExpectedLanding, clock: Callable[[], float]) -> None:
        self._imports, self._clock = imports, clock
        self._due_s: float | None = None

    def left_s(self, step_s: float, num_running: int) -> float:
        """Returns how long the next step of this many sequences may wait, given the time of steps; 0: it begins now."""
        expected_s = self._imports.imminent_s
        if expected_s is None:
            self._due_s = None
            return 0.0
        now_s = self._clock()
        if self._due_s is None:
            most_s = min(MAX_LANDING_DELAY_SHARE * step_s, MAX_LANDING_DELAY_S, step_s / max(1, num_running))
            if expected_s > most_s:
                return 0.0
            self._due_s = now_s + most_s
        if now_s < self._due_s:
            if expected_s <= self._due_s - now_s:
                return self._due_s - now_s
            self._due_s = None  # the awaited sequence has joined, and no other will in time
            return 0.0
        self._imports.mark_late()
        self._due_s = None
        return 0.0
