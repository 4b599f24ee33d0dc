"""Ends a process whose engine does not return from a step, because waits for devices have no timeout.

A thread of faulthandler, which does not need the interpreter lock, logs the stacks of all threads and ends the process.
"""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from collections.abc import Callable

AGAIN_S = 1.0  # the deadline is moved at most this often


class Alarm:
    """Wraps faulthandler's timer; a process has only one."""

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


alarm = Alarm()


def end_within(limit_s: float) -> None:
    """Ends this process with code 1 after `limit_s`, unless it ends earlier. Nothing can move this deadline later."""
    alarm.make_final(time.monotonic(), limit_s)


def ends_when_hung(limit_s: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Returns a function that an engine's loop calls in every round; the process ends `limit_s` after the last call.

    The exit code is 1. A limit of 0 means none. Further calls within a second only read the clock.
    """
    next_s = float("inf") if limit_s <= 0 else 0.0

    def on_round() -> None:
        nonlocal next_s
        now_s = clock()
        if now_s >= next_s:
            next_s = now_s + min(AGAIN_S, limit_s / 4)
            alarm.put_off(now_s, limit_s)

    return on_round
