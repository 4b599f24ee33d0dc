"""Profiles of steps: all kernels with their times, the bytes that they read and the bandwidth, and a trace.

On CPU operators take the place of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.spec import GpuShape
from pd_cluster.devices.device import Device, synchronize

ATTENTION = ("decode_kernel",)
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "aten::mm", "aten::addmm", "aten::linear")


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes that a step must read: of weights by its products, of keys and values by its attention."""

    weights: float
    kv: float

    @classmethod
    def of_decode(cls, shape: GpuShape, batch: int, context_len: float) -> Read:
        return cls(shape.read_nbytes, shape.decode_read_nbytes(batch, context_len) - shape.read_nbytes)


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


def kernels_of(profiler: Any, device: Device) -> list[tuple[float, int, str]]:
    """Returns (ms, calls, name), the longest first."""
    rows = list(profiler.key_averages())
    if device.is_accelerator:  # an operator's row includes its kernels' time
        rows = [each for each in rows if each.device_type.name != "CPU" and not each.is_user_annotation]
    of = "self_device_time_total" if device.is_accelerator else "self_cpu_time_total"
    return sorted(((getattr(each, of) / 1e3, each.count, each.key) for each in rows), reverse=True)


def page(kernels: list[tuple[float, int, str]], read: Read | None) -> list[str]:
    """Returns the lines of all kernels; with `read`, of products and attention together with their bandwidth."""
    busy_ms = sum(ms for ms, _, _ in kernels) or 1.0
    lines = [f"{'ms':>10} {'share':>7} {'calls':>6}  kernel"]
    lines += [f"{ms:10.3f} {ms / busy_ms:7.1%} {calls:6}  {name}" for ms, calls, name in kernels]
    if read is None:
        return lines
    lines += ["", f"{'ms':>10} {'GB read':>9} {'GB/s':>9}  kernels"]
    for what, words, nbytes in (("products", PRODUCTS, read.weights), ("attention", ATTENTION, read.kv)):
        took_ms = sum(ms for ms, _, name in kernels if any(word in name.lower() for word in words))
        rate = f"{nbytes / took_ms / 1e6:9.1f}" if took_ms else f"{'':>9}"
        lines.append(f"{took_ms:10.3f} {nbytes / 1e9:9.4f} {rate}  {what}")
    return lines


def write(profiler: Any, device: Device, place: Path, read: Read | None) -> float:
    """Writes `place`.txt and a gzipped trace beside it; returns the kernels' sum in ms."""
    kernels = kernels_of(profiler, device)
    Path(f"{place}.txt").write_text("\n".join(page(kernels, read)) + "\n")  # its name may have dots
    profiler.export_chrome_trace(f"{place}.trace.json.gz")
    return sum(ms for ms, _, _ in kernels)
