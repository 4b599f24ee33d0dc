"""A graph's first run follows all earlier launches, and no other work is captured with it."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.devices.device_streams import CopyStream, capture
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.model.lora.loaded_adapters import Adapters
from pd_cluster.model.lora.lora_targets import LoraTargets
from pd_cluster.model.lora.prompt_adapters import PromptAdapters
from pd_cluster.model.lora.tensor_placement import TensorPlacement
from tests.support.fake_device import FakeModule, Stream, install

POOL_SIZE = 4  # torch's pool has 32 streams


def test_the_run_before_a_capture_waits_for_what_fills_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    buffer, read = torch.zeros(1), torch.zeros(1)
    found: list[float] = []

    def synchronize(index: int) -> None:
        """Runs streams from newest to oldest, so that one waits for another only if the code says so."""
        for stream in reversed(gpu.streams):
            stream.run(stream.num_launched)
        found.append(read.item())

    _add_graphs(gpu, monkeypatch)
    monkeypatch.setattr(gpu, "synchronize", synchronize, raising=False)
    gpu.launch(0, lambda: buffer.fill_(7.0))
    capture(Device("cuda"))(lambda: read.copy_(buffer))
    assert found == [7.0]


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_copies_never_get_the_stream_that_is_captured(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reuses its few streams in turn, so after enough copies one could get the captured stream."""
    gpu = install(monkeypatch)
    _add_graphs(gpu, monkeypatch)
    pools: dict[int, itertools.cycle[Stream]] = {}
    captured: list[Stream] = []

    def stream_of_pool(index: int, priority: int = 0) -> Stream:
        if priority not in pools:
            pools[priority] = itertools.cycle([Stream(gpu) for _ in range(POOL_SIZE)])
        return next(pools[priority])

    def graph(*given: object, stream: Stream | None = None, **options: object) -> contextlib.nullcontext[None]:
        captured.append(stream or stream_of_pool(0))  # as torch.cuda.graph and torch.npu.graph do
        return contextlib.nullcontext()

    monkeypatch.setattr(gpu, "Stream", stream_of_pool)
    monkeypatch.setattr(gpu, "graph", graph)
    monkeypatch.setattr(gpu, "synchronize", lambda index: None, raising=False)
    make = capture(Device(kind))
    for _ in range(2):
        make(lambda: None)
    copying = [CopyStream(Device(kind)).stream for _ in range(2 * POOL_SIZE)]
    assert len(captured) == 2
    assert not set(captured) & set(copying)


def test_loading_an_adapter_waits_for_launches_but_not_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device-wide wait would invalidate a graph that the engine's thread is capturing."""
    gpu = install(monkeypatch)
    monkeypatch.setattr(gpu, "synchronize", lambda index: pytest.fail("the device is synchronized"), raising=False)
    done: list[str] = []
    device = Device("cuda")
    monkeypatch.setattr(TensorPlacement, "puts", lambda self: [lambda slot: gpu.launch(0, lambda: done.append("put"))])
    adapters = Adapters()
    adapters.places.rows.device = device
    adapters.put(1, SimpleNamespace(digest="a", path="folder", weights=bytes))  # type: ignore[arg-type]
    assert done == ["put"]
    monkeypatch.setattr(LoraTargets, "drop", lambda self, slot: done.append("dropped"))
    gpu.launch(0, lambda: done.append("step"))
    adapters.clear_slot(1)
    assert done == ["put", "step", "dropped"]
    prompts = PromptAdapters(8, KVLayout(1, 1, keys_and_values(8), 16, "float32"), device=device)
    prompts.loaded[1] = None  # type: ignore[assignment]
    gpu.launch(0, lambda: done.append("prompt"))
    prompts.clear_slot(1)
    assert done[-1] == "prompt"


def _add_graphs(gpu: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "graph_pool_handle", lambda: (0, 1), raising=False)
    monkeypatch.setattr(gpu, "CUDAGraph", SimpleNamespace, raising=False)
    monkeypatch.setattr(gpu, "NPUGraph", SimpleNamespace, raising=False)
    monkeypatch.setattr(gpu, "graph", lambda *given, **options: contextlib.nullcontext(), raising=False)
