"""Profiles of steps: all kernels with their times, and a trace. On CPU operators take the place of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pd_cluster.devices.device import Device, synchronize


@contextmanager
def profiled(device: Device) -> Iterator[Any]:
    """Profiles launches inside; the device is idle before and after."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.is_accelerator:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler
        synchronize(device)


def covered_ms(ranges: Iterable[tuple[float, float]]) -> float:
    """Returns the time within any of the (start, end) in microseconds: kernels side by side count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def busy_ms(profiler: Any, device: Device) -> float:
    """Returns how long any kernel or copy ran on the device; on CPU any operator."""
    kind = "CUDA" if device.is_accelerator else "CPU"
    events = [each for each in profiler.events() if each.device_type.name == kind and not each.is_user_annotation]
    return covered_ms((each.time_range.start, each.time_range.end) for each in events)


def write(profiler: Any, device: Device, place: Path) -> float:
    """Writes `place`.txt and a gzipped trace beside it; returns the kernels' sum in ms."""
    rows = list(profiler.key_averages())
    if device.is_accelerator:  # an operator's row includes its kernels' time
        rows = [each for each in rows if each.device_type.name != "CPU" and not each.is_user_annotation]
    of = "self_device_time_total" if device.is_accelerator else "self_cpu_time_total"
    kernels = sorted(((getattr(each, of) / 1e3, each.count, each.key) for each in rows), reverse=True)
    total_ms = sum(ms for ms, _, _ in kernels) or 1.0
    lines = [f"{'ms':>10} {'share':>7} {'calls':>6}  kernel"]
    lines += [f"{ms:10.3f} {ms / total_ms:7.1%} {calls:6}  {name}" for ms, calls, name in kernels]
    Path(f"{place}.txt").write_text("\n".join(lines) + "\n")  # its name may have dots
    profiler.export_chrome_trace(f"{place}.trace.json.gz")
    return total_ms
