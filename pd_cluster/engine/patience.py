"""When a decode step can wait: a caller that wants many answers, and none of them early, has time for a fuller batch.

A step costs what the weights cost to read, and something for each sequence. That is worth waiting for where prefill
computes on the same cores, which is said from outside: a device of one's own would only be idle. No clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pd_cluster.engine.scheduler import Scheduler

MOST_COMING = 2  # requests for each sequence that runs; beyond that a step waits
MOST_WAIT_S = 2.0  # since the last landing; then steps go on as ever until the next one


class Coming(Protocol):
    """What Patience asks of imports."""

    def num_on_their_way(self, batch: str) -> int: ...


class Patience:
    """The fewer sequences run of all that are known, the more a step is worth waiting with.

    Near the end of a batch few are still on their way, so no step waits then, and the last answer comes hardly later.
    """

    def __init__(self, scheduler: Scheduler, coming: Coming, clock: Callable[[], float]) -> None:
        self._scheduler, self._coming, self._clock = scheduler, coming, clock
        self._landed_s = float("-inf")

    def landed(self) -> None:
        """A sequence joined those that run."""
        self._landed_s = self._clock()

    @property
    def waits(self) -> bool:
        """Whether the next step does. With one of no batch or another, a prompt, or one without room it does not."""
        running = self._scheduler.running
        if not running or not (batch := running[0].batch) or self._scheduler.waiting:
            return False
        if self._clock() - self._landed_s > MOST_WAIT_S:
            return False
        if self._coming.num_on_their_way(batch) <= MOST_COMING * len(running):
            return False
        return all(request.batch == batch and request.num_behind == 1 for request in running)
