"""Times device work, by repeated launches between two waits; and calls of a module, and a process.

On CPU a call is over when it returns, so the host's clock is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pd_cluster.devices.device import Device, synchronize
from pd_cluster.devices.streams import capture
from pd_cluster.tables import spread

TICKS_PER_S = 100  # of /proc's start times, fixed by Linux for user space


class Timed(NamedTuple):
    """Seconds of one call: the median of several measurements, and their spread."""

    took_s: float
    samples: int
    spread: float | None


def time_launches(run: Callable[[], Any], device: Device, num_launches: int, num_tries: int) -> Timed:
    """Times `run`, which launches and does not wait, after one uncounted try."""
    took_s = []
    for _ in range(1 + num_tries):
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(num_launches):
            run()
        synchronize(device)
        took_s.append((time.perf_counter() - start_s) / num_launches)
    return Timed(median(took_s[1:]), num_tries, spread(took_s[1:]))


def time_kernels(run: Callable[[], Any], device: Device, num_launches: int, num_tries: int) -> Timed:
    """Times `run` like `time_launches`, from one graph of all the launches, which excludes the host's part."""
    if not device.is_accelerator:
        return time_launches(run, device, num_launches, num_tries)

    def several() -> None:
        for _ in range(num_launches):
            run()

    replay = capture(device)(several)
    found = time_launches(replay, device, 1, num_tries)
    return Timed(found.took_s / num_launches, found.samples, found.spread)


@contextmanager
def timed_calls(module: Any, names: Sequence[str]) -> Iterator[dict[str, float]]:
    """Yields the seconds spent in functions of a module meanwhile, by their names."""
    took_s: dict[str, float] = {}

    def timing(name: str, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return wrapped(*given, **named)
            finally:
                took_s[name] = took_s.get(name, 0.0) + time.perf_counter() - start_s

        return call

    kept = {name: getattr(module, name) for name in names}
    for name, wrapped in kept.items():
        setattr(module, name, timing(name, wrapped))
    try:
        yield took_s
    finally:
        for name, wrapped in kept.items():
            setattr(module, name, wrapped)


def process_age_s() -> float:
    """Returns the seconds since this process started, to a hundredth, including the interpreter's start."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_S
