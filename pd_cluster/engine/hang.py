"""Ends a process whose engine does not come back from a step: devices have no wait with an end.

faulthandler's thread does it, which needs no interpreter lock. It leaves the stacks of all threads in the log.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable

AGAIN_S = 1.0  # how often the deadline is put off, at most


def end_within(limit_s: float) -> None:
    """Whatever this process does now, by then it has ended, with code 1 if not of its own accord."""
    faulthandler.dump_traceback_later(limit_s, exit=True)


def ends_when_hung(limit_s: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """What an engine's loop calls whenever it comes round. `limit_s` after the last call the process ends, with code 1.

    0: never. Called more often than once a second, it costs a look at the clock.
    """
    next_s = float("inf") if limit_s <= 0 else 0.0

    def came_round() -> None:
        nonlocal next_s
        now_s = clock()
        if now_s >= next_s:
            next_s = now_s + min(AGAIN_S, limit_s / 4)
            end_within(limit_s)

    return came_round
