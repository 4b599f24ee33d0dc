"""A graph's first run comes after all that was launched before: what it reads from its buffers is the step's own."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from pd_cluster.device import Device
from pd_cluster.streams import capture
from tests.support.fake_device import FakeModule, install


def test_the_run_before_a_capture_waits_for_what_fills_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    buffer, read = torch.zeros(1), torch.zeros(1)
    found: list[float] = []

    def synchronize(index: int) -> None:
        """The stream that was made last goes first, and waits for others only where it was told to."""
        for stream in reversed(gpu.streams):
            stream.run(stream.num_launched)
        found.append(read.item())

    _add_graphs(gpu, monkeypatch)
    monkeypatch.setattr(gpu, "synchronize", synchronize, raising=False)
    gpu.launch(0, lambda: buffer.fill_(7.0))
    capture(Device("cuda"))(lambda: read.copy_(buffer))
    assert found == [7.0]


def _add_graphs(gpu: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "graph_pool_handle", lambda: (0, 1), raising=False)
    monkeypatch.setattr(gpu, "CUDAGraph", SimpleNamespace, raising=False)
    monkeypatch.setattr(gpu, "graph", lambda *given, **options: contextlib.nullcontext(), raising=False)
