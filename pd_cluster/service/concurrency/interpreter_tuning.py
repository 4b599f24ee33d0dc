"""Tunes the Python interpreter for a process that serves thousands of streams."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

# How long the mailbox's thread and the event loop's thread wait for each other's interpreter lock. With shorter waits,
# thread switches cost more than is gained.
SWITCH_INTERVAL_S = 0.0005
# With Python's default thresholds, garbage collection takes a sixth of the process's time. An ended request leaves no
# cycles, so full collections can be rare; each pauses the process for a time that grows with the number of open
# streams.
GC_THRESHOLDS = (2_000, 1_000, 10)


def tune() -> None:
    """Tunes the interpreter; call it after all imports."""
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class _Collector:
    lock = threading.Lock()
    num_calls = 0  # running calls that need rare collections
    own = GC_THRESHOLDS  # the thresholds outside of such calls


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Makes collections rarer during calls in a user's process; the end of the last call restores the thresholds."""
    with _Collector.lock:
        if not _Collector.num_calls:
            _Collector.own = gc.get_threshold()
            if _Collector.own[0]:  # 0: collection is off
                gc.set_threshold(*map(max, _Collector.own, GC_THRESHOLDS))
        _Collector.num_calls += 1
    try:
        yield
    finally:
        with _Collector.lock:
            _Collector.num_calls -= 1
            if not _Collector.num_calls:
                gc.set_threshold(*_Collector.own)
