"""Times what a device does: repeated launches between two waits, and events around single ones.

On CPU a call is over when it returns, and the clock of the host is all there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from pd_cluster.bench.report import spread
from pd_cluster.device import Device, synchronize
from pd_cluster.streams import capture

TICKS_PER_S = 100  # of /proc's start times: Linux tells user space no other


class Timed(NamedTuple):
    """Seconds of one call: the median of several measurements, and their spread."""

    took_s: float
    samples: int
    spread: float | None


def time_launches(run: Callable[[], Any], device: Device, num_launches: int, num_tries: int) -> Timed:
    """`run` launches and does not wait. After one try that is not counted."""
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
    """As `time_launches`, from one graph of all the launches, so that the host's part is not in it."""
    if not device.is_accelerator:
        return time_launches(run, device, num_launches, num_tries)

    def several() -> None:
        for _ in range(num_launches):
            run()

    replay = capture(device)(several)
    found = time_launches(replay, device, 1, num_tries)
    return Timed(found.took_s / num_launches, found.samples, found.spread)


class LaunchClock:
    """How long the device was busy with each launch of a runner: from when it began one to when it ended it.

    Whatever it waits for between two kernels of one launch counts as busy, because graphs leave the host out of that.
    On CPU: the time inside of `forward`.
    """

    def __init__(self, runner: Any, device: Device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.Event, torch.Event]] = []
        self._host_s = 0.0
        self._runner = runner
        self._name = "launch" if device.is_accelerator else "forward"

    def __enter__(self) -> LaunchClock:
        wrapped = getattr(self._runner, self._name)
        around = self._between_events if self._device.is_accelerator else self._on_host
        setattr(self._runner, self._name, lambda *given: around(wrapped, given))
        return self

    def __exit__(self, *error: object) -> None:
        delattr(self._runner, self._name)  # the class's own is seen again

    def busy_s(self) -> float:
        """Of all launches so far."""
        synchronize(self._device)
        return self._host_s + sum(before.elapsed_time(after) for before, after in self._pairs) / 1e3

    def forget(self) -> None:
        self._pairs, self._host_s = [], 0.0

    def _between_events(self, wrapped: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        before, after = (torch.Event(self._device.torch_name, enable_timing=True) for _ in range(2))
        before.record()
        result = wrapped(*given)
        after.record()
        self._pairs.append((before, after))
        return result

    def _on_host(self, wrapped: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        start_s = time.perf_counter()
        result = wrapped(*given)
        self._host_s += time.perf_counter() - start_s
        return result


def process_age_s() -> float:
    """Seconds since this process was started, to a hundredth, its interpreter's own start included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_S
