"""Streams, marks and graphs of launches on a device.

On CPU, calls are synchronous. NPUs work like CUDA devices, except where noted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device

HostValues = Mapping[str, list[int]]  # the values that the host passed to launches, by argument name
Replay = Callable[..., Any]  # repeats all launches; HostValues replace the values passed in the capture

# torch hands out the 32 streams of each priority in rotation. If another thread launched work on the captured stream,
# the work would become part of the graph instead of running. Streams for copies therefore must not have this priority,
# nor the highest, which the ranks' sums use in captures (model/parallel/rank_group.py).
CAPTURE_PRIORITY = -1  # a high priority, but not the highest

_current = threading.local()  # used on NPUs, where querying the current stream is slow


def poll(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Polls a condition, because devices offer no wait with a timeout. Returns whether it became true in time.

    The pause before the next poll is an eighth of the elapsed time, but at most a millisecond.
    """
    started_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - started_s
        if waited_s >= timeout_s:
            return False
        time.sleep(min(1e-3, 2e-5 + waited_s / 8))
    return True


class Marker:
    """A position in launched work that the host or another stream can wait for."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks the host without holding the interpreter's lock. Returns False if the marker was not reached in
        time.
        """
        if timeout_s is not None:
            return poll(lambda: self.is_reached, timeout_s)
        if self._event is not None:
            self._event.synchronize()
        return True

    @property
    def is_reached(self) -> bool:
        return self._event is None or bool(self._event.query())


REACHED = Marker(None)


class CopyStream:
    """A stream for copies alongside computation. On CPU, calls are synchronous."""

    def __init__(self, device: Device, priority: int = 0) -> None:
        self._device = device
        self.stream: Any = None
        if device.is_accelerator:
            self.stream = devices._module(device).Stream(device.index, priority=priority)

    def after(self, marker: Marker) -> None:
        """Delays later launches on this stream until the marker is reached; the host does not wait."""
        if self.stream is not None and marker._event is not None:
            self.stream.wait_event(marker._event)

    def __enter__(self) -> CopyStream:
        """Directs launches inside the block to this stream."""
        if self.stream is not None:
            self._context = devices._module(self._device).stream(self.stream)
            self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self._context.__exit__(*error)

    def mark(self) -> Marker:
        """Returns a marker after everything that was launched on this stream."""
        return _recorded(self._device, self.stream)


def mark(device: Device) -> Marker:
    """Returns a marker after everything that this thread has launched on its current stream."""
    return _recorded(device, _current_stream(device) if device.is_accelerator else None)


def _current_stream(device: Device) -> Any:
    module = devices._module(device)
    if not device.traits.is_slow_to_name_streams:
        return module.current_stream(device.index)
    known: dict[str, Any] = _current.__dict__
    if (stream := known.get(str(device.index))) is None:
        stream = known[str(device.index)] = module.current_stream(device.index)
    return stream


def _recorded(device: Device, stream: Any) -> Marker:
    if stream is None:
        return Marker(None)
    event = devices._module(device).Event(blocking=True)  # waiting threads sleep, because other threads need the core
    event.record(stream)
    return Marker(event)


def capture(device: Device) -> Callable[[Callable[[], Any]], Replay]:
    """Returns a function that runs and captures launches on an accelerator as a graph, and returns a function that
    repeats them.

    The capture and each repetition return the same tensors. All graphs share memory, so each run overwrites earlier
    results. Only NPUs can replace the values that the host passed to launches.
    """
    module = devices._module(device)
    side = CopyStream(device, CAPTURE_PRIORITY)
    # Other threads copy during a capture. With "thread_local", only this thread's launches are captured, and only this
    # thread is forbidden to synchronize.
    options = {"pool": module.graph_pool_handle(), "stream": side.stream, "capture_error_mode": "thread_local"}
    make_graph = {"cuda": _cuda_graph, "npu": _npu_graph}[device.kind]

    def make(run: Callable[[], Any]) -> Replay:
        side.after(mark(device))  # marks this thread's own stream, before the side stream replaces it
        with side:  # a run without capture compiles and loads kernels, which is not possible in a capture
            run()
        devices.synchronize(device)
        return make_graph(device, module, options, run)

    return make


def _cuda_graph(device: Device, module: Any, options: Mapping[str, Any], run: Callable[[], Any]) -> Replay:
    graph = module.CUDAGraph()
    with module.graph(graph, **options):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _npu_graph(device: Device, module: Any, options: Mapping[str, Any], run: Callable[[], Any]) -> Replay:
    """Captures an NPU graph. torch-npu records the graph's attention operations, and replaces their sequence lengths
    before a replay.

    Each attention operation of a running graph waits for its new lengths, which may be set only after the graph's
    previous run has ended.
    """
    graph = module.NPUGraph()
    with module.graph(graph, auto_dispatch_capture=True, **options):
        result = run()
    last = [Marker(None)]

    def replay(values: HostValues | None = None) -> Any:
        last[0].wait()
        if values:
            graph.update(cpu_update_input=[dict(values)])
        graph.replay()
        last[0] = mark(device)
        return result

    return replay
