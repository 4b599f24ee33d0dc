"""The Python interpreter as a process wants it that serves thousands of streams."""

from __future__ import annotations

import gc
import sys

# How long the mailbox's thread waits until the event loop's lets it run. Python's own 0.005 would be added to each way.
SWITCH_INTERVAL_S = 0.0001
# With Python's own, looking for cycles takes a sixth of the process's time. An ended request leaves none behind, so
# what is older than a short look is looked at seldom: that stops everything for as long as many streams are open.
GC_THRESHOLDS = (2_000, 1_000, 10)


def tune() -> None:
    """Once everything is imported."""
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
