"""A pytest plugin that isolates tests on a GPU; active where torch has a CUDA device.

After each test it waits for the device, so that a failing kernel fails its own test, and releases cached memory. After
a sticky CUDA error every later call fails, so the process ends and xdist starts another worker. Each worker may use
its share of the memory. Tests marked `alone` run last; scripts/gpu_check.sh runs them in a separate process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SHARE = 0.9  # fraction of the device's memory for all workers together
STICKY_EXIT = 70


class GpuGuard:
    """`synchronize` raises RuntimeError if a kernel failed; `release` frees cached memory."""

    def __init__(self, synchronize: Callable[[], object], release: Callable[[], object]) -> None:
        self._synchronize, self._release = synchronize, release
        self._sticky = ""

    @pytest.fixture(autouse=True)
    def _device_is_idle(self) -> Iterator[None]:
        yield
        try:
            self._synchronize()
        except RuntimeError as error:
            self._sticky = self._repeats()
            pytest.fail(f"the device failed during this test: {error}", pytrace=False)
        self._release()

    def _repeats(self) -> str:
        try:
            self._synchronize()
        except RuntimeError as error:
            return str(error)
        return ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Ends this process after a sticky error, once the test has been reported."""
        if not self._sticky:
            return
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the device does not recover: {self._sticky}", STICKY_EXIT)
        print(f"this worker ends: {self._sticky}", file=sys.stderr, flush=True)
        os._exit(STICKY_EXIT)  # atexit handlers would fail on the broken device

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def share_of_memory() -> float | None:
    """Returns the fraction of the device's memory that this process may use; None without other workers."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return None if num_workers == 1 else SHARE / num_workers


def for_cuda() -> GpuGuard | None:
    """Returns a guard of torch's CUDA device; None without such a device, or if the tests run on the CPU."""
    if not any(os.path.exists(f"/dev/nvidia{name}") for name in ("ctl", "0")):  # no GPU: avoids importing torch
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    share = share_of_memory()

    def synchronize() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def release() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    if share is not None:
        cuda: Any = torch.cuda
        cuda.set_per_process_memory_fraction(share)
    return GpuGuard(synchronize, release)
