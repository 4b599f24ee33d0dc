"""When a decode step can wait: a caller that wants many answers, and none of them early, has time for a fuller batch.

A step costs what the weights cost to read, and little more for each sequence. Knows no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pd_cluster.engine.scheduler import Scheduler

MOST_COMING = 2  # requests for each sequence that runs; beyond that a step waits
MOST_WAIT_S = 2.0  # since the last landing: while a prompt takes longer than that, decoding may as well go on


class Coming(Protocol):
    """What Patience asks of imports."""

    @property
    def num_on_their_way(self) -> int: ...


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
        """Whether the next step does. Somebody who reads along, a prompt to compute or one without room ends it."""
        running = self._scheduler.running
        if not running or not running[0].in_batch or self._scheduler.waiting:
            return False
        if self._clock() - self._landed_s > MOST_WAIT_S or self._coming.num_on_their_way <= MOST_COMING * len(running):
            return False
        return all(request.in_batch and request.num_behind == 1 for request in running)
