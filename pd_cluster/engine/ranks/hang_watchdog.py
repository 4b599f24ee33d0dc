"""Ends a process whose engine does not return from a step, because waits for devices have no timeout.

faulthandler's thread does it without the interpreter lock, and logs the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from collections.abc import Callable

AGAIN_S = 1.0  # the shortest time between two changes of the deadline


class _Alarm:
    """Wraps faulthandler's timer, of which a process has one."""

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
    """Ends this process with code 1 unless it has ended by then. This deadline cannot be changed."""
    _alarm.make_final(time.monotonic(), limit_s)


def ends_when_hung(limit_s: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Returns a function for an engine's loop to call in every round; `limit_s` after its last call the process ends.

    The exit code is 1. 0 disables the limit. More than one call per second only reads the clock.
    """
    next_s = float("inf") if limit_s <= 0 else 0.0

    def on_round() -> None:
        nonlocal next_s
        now_s = clock()
        if now_s >= next_s:
            next_s = now_s + min(AGAIN_S, limit_s / 4)
            _alarm.put_off(now_s, limit_s)

    return on_round
