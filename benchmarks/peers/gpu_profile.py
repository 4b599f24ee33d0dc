"""Times work on a device by repeated launches between two waits, and by profiles of steps; also reads this process's
age.

On CPU, operators take the place of kernels, and a call has ended when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pd_cluster.devices.device import Device, synchronize

TICKS_PER_S = 100  # unit of /proc's start times, which Linux fixes for user space


@contextmanager
def profiled(device: Device) -> Iterator[Any]:
    """Profiles launches inside the block. The device is idle before and after it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.is_accelerator:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler
        synchronize(device)


def covered_ms(ranges: Iterable[tuple[float, float]]) -> float:
    """Returns the time covered by the ranges (start, end), in microseconds; simultaneous kernels count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def busy_ms(profiler: Any, device: Device) -> float:
    """Returns the time during which any kernel or copy ran on the device; on CPU, any operator."""
    kind = "CUDA" if device.is_accelerator else "CPU"
    events = [each for each in profiler.events() if each.device_type.name == kind and not each.is_user_annotation]
    return covered_ms((each.time_range.start, each.time_range.end) for each in events)


def write(profiler: Any, device: Device, place: Path) -> float:
    """Writes `place`.txt, and a gzipped trace next to it. Returns the kernels' total time in ms."""
    rows = list(profiler.key_averages())
    if device.is_accelerator:  # rows of operators include their kernels' time
        rows = [each for each in rows if each.device_type.name != "CPU" and not each.is_user_annotation]
    of = "self_device_time_total" if device.is_accelerator else "self_cpu_time_total"
    kernels = sorted(((getattr(each, of) / 1e3, each.count, each.key) for each in rows), reverse=True)
    total_ms = sum(ms for ms, _, _ in kernels) or 1.0
    lines = [f"{'ms':>10} {'share':>7} {'calls':>6}  kernel"]
    lines += [f"{ms:10.3f} {ms / total_ms:7.1%} {calls:6}  {name}" for ms, calls, name in kernels]
    Path(f"{place}.txt").write_text("\n".join(lines) + "\n")  # not `with_suffix`, because the name may contain dots
    profiler.export_chrome_trace(f"{place}.trace.json.gz")
    return total_ms


def launches_s(run: Callable[[], Any], device: Device, num_launches: int, num_tries: int) -> list[float]:
    """Returns the seconds of one call in each try. `run` launches without waiting. The first try is not counted."""
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
    """Returns the seconds since this process started, including the interpreter's start, to 0.01 s."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_S
