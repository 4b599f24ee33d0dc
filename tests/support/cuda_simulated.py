"""A CUDA device in the host's memory, for interpreted kernels: loader, runner and graphs work as on a GPU.

A graph repeats the torch operators and Triton kernels that it captured, on the same tensors. Anything computed outside
the graph, or on the host, stays as it was at the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device
from pd_cluster.model.graphs import step_graphs
from pd_cluster.native import packed_products
from tests.support.npu_devices import FakeEvent, FakeGraph, FakeNpu, FakeStream, capturing, current_graph

WAITING = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select"}


class CapturedCalls(FakeGraph):
    waiting = WAITING

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class FakeCuda(FakeNpu):
    """The part of torch.cuda that is used."""

    Event, Stream, CUDAGraph = FakeEvent, FakeStream, CapturedCalls

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    def get_device_name(self, index: int) -> str:
        return "Hopper, simulated"

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{index}", multi_processor_count=4, major=9, minor=0)

    @contextlib.contextmanager
    def graph(  # type: ignore[override]
        self, graph: CapturedCalls, pool: object, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        with capturing(graph):
            yield


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes `--device cuda` mean the host until `patch` is undone. Graphs are captured when a step needs them."""
    fake, run = FakeCuda(), InterpretedFunction.run

    def launch(self: Any, *args: Any, **options: Any) -> None:
        graph = current_graph()
        if graph is None:
            run(self, *args, **options)
            return
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            graph.launches.append(lambda: run(self, *args, **options))
            run(self, *args, **options)

    patch.setattr(InterpretedFunction, "run", launch)
    patch.setattr(devices, "_module", lambda device: fake)
    patch.setattr(devices, "num_cuda_devices", fake.device_count)
    patch.setattr(Device, "torch_name", property(lambda device: "cpu"))
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    for name in ("empty", "zeros"):
        patch.setattr(torch, name, _unpinned(getattr(torch, name)))
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # so that no weights are packed for a CPU
    patch.setattr(packed_products, "load_library", lambda flags: None)  # so that no products are those for CPUs
    patch.setattr(step_graphs, "MAX_START_S", 0.0)


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *size, pin_memory=False, **options: make(*size, **options)
