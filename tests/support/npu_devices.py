"""Simulates torch.npu in host memory: streams, graphs, memory of another process.

Used by npu_simulated.py only. A graph repeats exactly the captured calls, with the host's values at capture.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NUM_DEVICES = 8  # as in an Atlas A2
UPDATED = {  # captured operator -> the arguments that replays update
    "npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
# Operators that may make the host wait for the device, so that a capture must not contain them.
WAITING = {
    *("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select"),
    *("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
}


_here = threading.local()  # `graph`: the graph that this thread is capturing


class FakeGraph(TorchDispatchMode):
    """Repeats the captured calls on the same tensors, with the host's values at capture."""

    waiting = WAITING

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.auto_dispatch_capture = False
        self.launches: list[Callable[[], None]] = []
        self._given: list[tuple[str, dict[str, Any]]] = []  # operator, arguments by name
        self._is_told = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in self.waiting, f"{name} may wait for the device, but is captured"
        kwargs = dict(kwargs or {})
        found = func(*args, **kwargs)
        outs = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
        there = {
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        if func._schema.is_mutable or not all(each.untyped_storage().data_ptr() in there for each in outs):
            self.launches.append(partial(_again, func, args, kwargs, list(outs)))  # views need no replay
            self._given.append((name.removeprefix("npu::"), kwargs))
        return found

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        assert self.auto_dispatch_capture
        (values,) = cpu_update_input
        for name, kwargs in self._given:
            for key in UPDATED.get(name, ()):
                if key in values:
                    assert len(values[key]) == len(kwargs[key])
                    kwargs[key] = values[key]
        self._is_told = True

    def replay(self) -> None:
        waits = any(name in UPDATED for name, _ in self._given)
        assert self._is_told == waits, "an attention waits in the graph for its lengths"
        self._is_told = False
        for launch in self.launches:
            launch()


def _again(func: Any, args: Any, kwargs: dict[str, Any], outs: list[torch.Tensor]) -> None:
    fresh = func(*args, **kwargs)
    if outs and not func._schema.is_mutable:
        for to, of in zip(outs, fresh if isinstance(fresh, (list, tuple)) else [fresh], strict=True):
            to.copy_(of)


def current_graph() -> FakeGraph | None:
    """Returns the graph that this thread captures."""
    return getattr(_here, "graph", None)


@contextlib.contextmanager
def capturing(graph: FakeGraph) -> Iterator[None]:
    _here.graph = graph
    try:
        with graph:
            yield
    finally:
        _here.graph = None


def launched(launch: Callable[[], Any]) -> Any:
    """Makes a launch that is not an operator; returns its work. During a capture, only records it for replays."""
    graph = current_graph()
    if graph is None:
        return launch()
    graph.launches.append(lambda: launch().wait())
    return SimpleNamespace(wait=lambda: None)


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None: ...
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class FakeStream:
    def __init__(self, device: int = 0, priority: int = 0) -> None:
        self.index = device

    def wait_event(self, event: FakeEvent) -> None: ...


class FakeNpu:
    """The used part of torch.npu, over devices in host memory."""

    Event, Stream, NPUGraph = FakeEvent, FakeStream, FakeGraph

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        """Returns attributes that only torch-npu itself reads."""
        return getattr(self._real, name)

    def device_count(self) -> int:
        return NUM_DEVICES

    def get_device_name(self, index: int) -> str:
        return "Ascend910B3, simulated"

    def set_device(self, index: int) -> None:
        assert 0 <= index < NUM_DEVICES

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 3 << 30, 4 << 30

    def memory_reserved(self, index: int) -> int:
        return 1 << 28

    max_memory_reserved = memory_reserved

    def reset_peak_memory_stats(self, index: int) -> None: ...
    def empty_cache(self) -> None: ...
    def synchronize(self, index: int) -> None: ...

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"NPU-{index}", cube_core_num=24)

    def can_device_access_peer(self, index: int, other: int) -> bool:
        return True

    def current_stream(self, index: int) -> FakeStream:
        return FakeStream(index)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        yield

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    @contextlib.contextmanager
    def graph(
        self, graph: FakeGraph, pool: object, stream: FakeStream, auto_dispatch_capture: bool, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        graph.auto_dispatch_capture = auto_dispatch_capture
        with capturing(graph):
            yield


replaced: dict[str, Any] = {}  # torch-npu's own methods, by name


def share_memory() -> None:
    """Implements torch-npu's calls for sharing memory between processes: a handle names a descriptor."""
    storage: Any = torch.UntypedStorage
    replaced["_new_shared_npu"] = storage._new_shared_npu
    storage._share_cpu_ = _share
    storage._release_ipc_counter_cpu = lambda counter, at: None
    storage._new_shared_npu = _map


def _share(storage: Any) -> tuple[Any, ...]:
    fd, nbytes = storage._share_fd_cpu_()  # moves the storage to shared memory
    return 0, f"/proc/{os.getpid()}/fd/{os.dup(fd)}".encode(), nbytes, 0, b"/none", 0, b"", False


def _map(index: int, handle: bytes, nbytes: int, offset: int, *others: object) -> Any:
    fd = os.open(handle.decode(), os.O_RDONLY)
    try:
        view = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns about read-only memory
        return torch.frombuffer(view, dtype=torch.uint8, offset=offset).untyped_storage()
