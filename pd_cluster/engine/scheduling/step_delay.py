"""Decides when a decode step waits: for one sequence that joins soon, or for many of a batch that is not urgent.

A step takes the time to read the weights, plus a time per sequence, so fuller steps cost less per token. Waiting pays
only if prefill computes on the same cores; a separate device would just be idle. The caller determines whether that is
so. This module has no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pd_cluster.engine.scheduling.scheduler import StepScheduler

MAX_INCOMING = 2  # a step waits only if more requests than this are incoming per running sequence
MAX_LANDING_DELAY_SHARE = 0.25  # the longest delay for a landing, as a share of a step; shorter if many sequences run
MAX_LANDING_DELAY_S = 0.02  # the same limit in seconds: only a last token and two messages are missing
MAX_WAIT_S = 2.0  # after this time without a landing, steps are not delayed until there is another


class PendingLandings(Protocol):
    """The part of imports that StepDelay needs."""

    num_landings: int

    def num_incoming(self, batch: str) -> int: ...


class StepDelay:
    """Delays steps while many sequences of a batch are incoming.

    The fewer sequences run, the more a delay pays. Near the end of a batch only few sequences are still incoming, so
    steps no longer wait, and the last answer is hardly delayed.
    """

    def __init__(self, scheduler: StepScheduler, coming: PendingLandings, clock: Callable[[], float]) -> None:
        self._scheduler, self._coming, self._clock = scheduler, coming, clock
        self._num_landings, self._landed_s = coming.num_landings, float("-inf")

    @property
    def waits(self) -> bool:
        """Whether the next step waits.

        It never waits if it has prompts, if its requests are not all of one batch, or if a request waits for admission.
        """
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
    """Delays a step a little, so that it can include a sequence whose KV cache has already arrived.

    Without the delay, the sequence would get its second token only from the step after this one. So the sequence gains
    at most the time of a step, and the delay is limited so that all running sequences together lose no more. If the
    sequence is expected later than that, the step begins at once. No two steps wait for the same transfer.
    """

    def __init__(self, imports: ExpectedLanding, clock: Callable[[], float]) -> None:
        self._imports, self._clock = imports, clock
        self._due_s: float | None = None

    def left_s(self, step_s: float, num_running: int) -> float:
        """Returns how long the next step waits, given a step's usual time and number of sequences; 0: it begins now."""
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
            self._due_s = None  # the awaited sequence has joined, and no other will join in time
            return 0.0
        self._imports.mark_late()
        self._due_s = None
        return 0.0
