"""Times device work by repeated launches between two waits, and this process. On CPU a call is over when it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pd_cluster.devices.device import Device, synchronize

TICKS_PER_S = 100  # of /proc's start times, fixed by Linux for user space


def launches_s(run: Callable[[], Any], device: Device, num_launches: int, num_tries: int) -> list[float]:
    """Returns the seconds of one call, of each try. `run` launches and does not wait; the first try is not counted."""
    took_s = []
    for _ in range(1 + num_tries):
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(num_launches):
            run()
        synchronize(device)
        took_s.append((time.perf_counter() - start_s) / num_launches)
    return took_s[1:]


def process_age_s() -> float:
    """Returns the seconds since this process started, to a hundredth, including the interpreter's start."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_S
