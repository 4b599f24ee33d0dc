"""Fixtures of the model tests."""

from __future__ import annotations

import pytest

from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.native import build


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    """Returns the C kernels; skips the test where they cannot be built."""
    try:
        return CpuOps()
    except build.KernelsUnavailable as reason:
        pytest.skip(str(reason))
