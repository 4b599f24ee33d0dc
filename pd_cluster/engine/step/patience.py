"""Decides when a decode step can wait: a caller that wants many answers, none of them early, gains by a fuller batch.

A step costs reading the weights, plus something for each sequence. Waiting pays where prefill computes on the same
cores, which the caller determines: a separate device would only idle. No clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pd_cluster.engine.step.scheduler import StepScheduler

MOST_COMING = 2  # requests per running sequence; with more on their way, a step waits
MOST_WAIT_S = 2.0  # since the last landing; then steps continue as usual until the next one


class Coming(Protocol):
    """The part of imports that Patience needs."""

    def num_on_their_way(self, batch: str) -> int: ...


class Patience:
    """The smaller the share of known sequences that run, the more it pays to delay a step.

    Near the end of a batch few are still on their way, so no step waits then, and the last answer is hardly delayed.
    """

    def __init__(self, scheduler: StepScheduler, coming: Coming, clock: Callable[[], float]) -> None:
        self._scheduler, self._coming, self._clock = scheduler, coming, clock
        self._landed_s = float("-inf")

    def landed(self) -> None:
        """Notes that a sequence joined the running ones."""
        self._landed_s = self._clock()

    @property
    def waits(self) -> bool:
        """Whether the next step waits. It does not with other batches or none, prompts, or a request without room."""
        running = self._scheduler.running
        if not running or not (batch := running[0].batch) or self._scheduler.waiting:
            return False
        if self._clock() - self._landed_s > MOST_WAIT_S:
            return False
        if self._coming.num_on_their_way(batch) <= MOST_COMING * len(running):
            return False
        return all(request.batch == batch and request.num_behind == 1 for request in running)
