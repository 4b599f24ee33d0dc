"""The Python interpreter as a process wants it that serves thousands of streams."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

# How long the mailbox's thread waits until the event loop's lets it run. Python's own 0.005 would be added to each way.
SWITCH_INTERVAL_S = 0.0001
# With Python's own, looking for cycles takes a sixth of the process's time. An ended request leaves none behind, so
# what is older than a short look is looked at seldom: that stops everything for as long as many streams are open.
GC_THRESHOLDS = (2_000, 1_000, 10)


def tune() -> None:
    """Once everything is imported."""
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class _Collector:
    lock = threading.Lock()
    num_calls = 0  # that want it to look seldom
    own = GC_THRESHOLDS  # what it is set to otherwise


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """For the length of a call in somebody else's process; what was set before comes back with the last one's end."""
    with _Collector.lock:
        if not _Collector.num_calls:
            _Collector.own = gc.get_threshold()
            if _Collector.own[0]:  # else it is off
                gc.set_threshold(*map(max, _Collector.own, GC_THRESHOLDS))
        _Collector.num_calls += 1
    try:
        yield
    finally:
        with _Collector.lock:
            _Collector.num_calls -= 1
            if not _Collector.num_calls:
                gc.set_threshold(*_Collector.own)
