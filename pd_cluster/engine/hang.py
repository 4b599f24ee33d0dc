"""Ends a process whose engine does not come back from a step: devices have no wait with an end.

faulthandler's thread does it, which needs no interpreter lock. It leaves the stacks of all threads in the log.
"""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from collections.abc import Callable

AGAIN_S = 1.0  # how often the deadline is put off, at most


class _Alarm:
    """faulthandler has one for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_final = False
        self._at_s = math.inf

    def put_off(self, now_s: float, limit_s: float) -> None:
        with self._lock:
            if not self._is_final:
                self._set(now_s, limit_s)

    def make_final(self, now_s: float, limit_s: float) -> None:
        with self._lock:
            self._is_final = True
            if now_s + limit_s < self._at_s:
                self._set(now_s, limit_s)

    def _set(self, now_s: float, limit_s: float) -> None:
        self._at_s = now_s + limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True)


_alarm = _Alarm()


def end_within(limit_s: float) -> None:
    """This process, with code 1 if not of its own accord; nothing puts it off."""
    _alarm.make_final(time.monotonic(), limit_s)


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
            _alarm.put_off(now_s, limit_s)

    return came_round
