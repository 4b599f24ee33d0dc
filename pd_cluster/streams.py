"""What is launched on a device and in which order: streams, marks in them, and graphs of launches.

On CPU everything has happened when a call returns. NPUs offer what CUDA does; where they differ is said there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pd_cluster import device as devices
from pd_cluster.device import Device

HostValues = Mapping[str, list[int]]  # what launches were given by the host, by the names of their arguments
Replay = Callable[..., Any]  # launches all again; given HostValues, with these in place of what the host gave before

# torch hands out the 32 streams of a priority in turn, again and again. What another thread launched on the one that is
# captured would go into the graph and not be done: so no copy may be of that priority, nor of that of the ranks' sums,
# which join the capture on a stream of their own (device_group.py: the highest).
CAPTURE_PRIORITY = -1  # a high one

_current = threading.local()  # on NPUs, where asking for the current stream is slow


def poll(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Whether that comes to hold in time. Devices have no wait with an end, so they are asked again and again.

    After an eighth of the time that has passed, and at least every millisecond.
    """
    started_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - started_s
        if waited_s >= timeout_s:
            return False
        time.sleep(min(1e-3, 2e-5 + waited_s / 8))
    return True


class Marker:
    """A place in the work that was launched, which the host or another stream can wait for."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """The host waits, without holding the interpreter's lock; False when it was not reached in time."""
        if timeout_s is not None:
            return poll(lambda: self.is_reached, timeout_s)
        if self._event is not None:
            self._event.synchronize()
        return True

    @property
    def is_reached(self) -> bool:
        return self._event is None or bool(self._event.query())


REACHED = Marker(None)


class SideStream:
    """Copies that go on beside what is computed. On CPU everything has happened when a call returns."""

    def __init__(self, device: Device, priority: int = 0) -> None:
        self._device = device
        self._stream: Any = None
        if device.is_accelerator:
            self._stream = devices._module(device).Stream(device.index, priority=priority)

    def after(self, marker: Marker) -> None:
        """What is launched here from now on begins when that is reached; the host does not wait."""
        if self._stream is not None and marker._event is not None:
            self._stream.wait_event(marker._event)

    def __enter__(self) -> SideStream:
        """What is launched inside goes to this stream."""
        if self._stream is not None:
            self._context = devices._module(self._device).stream(self._stream)
            self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._context.__exit__(*error)

    def mark(self) -> Marker:
        """Behind all that was launched here."""
        return _recorded(self._device, self._stream)


def mark(device: Device) -> Marker:
    """Behind all that this thread has launched on its current stream."""
    return _recorded(device, _current_stream(device) if device.is_accelerator else None)


def _current_stream(device: Device) -> Any:
    module = devices._module(device)
    if device.kind != "npu":
        return module.current_stream(device.index)
    known: dict[str, Any] = _current.__dict__
    if (stream := known.get(str(device.index))) is None:
        stream = known[str(device.index)] = module.current_stream(device.index)
    return stream


def _recorded(device: Device, stream: Any) -> Marker:
    if stream is None:
        return Marker(None)
    event = devices._module(device).Event(blocking=True)  # whoever waits sleeps: the other threads need the core
    event.record(stream)
    return Marker(event)


def capture(device: Device) -> Callable[[Callable[[], Any]], Replay]:
    """What makes a graph of an accelerator's launches: called with what launches, it returns what launches all again.

    Both return the same tensors. The graphs share their memory: what one returned, the next overwrites. Values that
    the host has given to launches can only be given anew on NPUs.
    """
    module = devices._module(device)
    side = SideStream(device, CAPTURE_PRIORITY)
    # Other threads copy meanwhile: only this one's launches are captured, and may not wait.
    options = {"pool": module.graph_pool_handle(), "stream": side._stream, "capture_error_mode": "thread_local"}
    make_graph = _npu_graph if device.kind == "npu" else _cuda_graph

    def make(run: Callable[[], Any]) -> Replay:
        side.after(mark(device))  # of this thread's own stream, before the side's takes its place
        with side:  # once as it is: kernels are compiled and loaded, which no capture can hold
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
    """torch-npu writes down every attention that it captures, and tells it new lengths of its own accord.

    A graph waits, in each of them, for its new lengths: they may only be given when its last run is over.
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
