"""A fake device with streams and events over CPU tensors, which computes only when the host waits for it.

Work launched on a stream is recorded, and runs only when the host waits for a later event (or queries it repeatedly).
So a test detects code that reads or reports too early, whatever the machine's speed. It replaces torch.cuda or
torch.npu in device.py; a memfd takes the place of another process's memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pd_cluster.devices import device as devices
from pd_cluster.devices import device_streams
from pd_cluster.devices.device import Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.kv.block_major import DeviceBlocks
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.transport import device_pair
from pd_cluster.transport.device_memory import MemoryPart
from tests.support.recorded import refill

ANSWERS_HOST = {"aten::equal", "aten::_local_scalar_dense", "aten::item"}


class Stream:
    def __init__(self, device: FakeModule) -> None:
        self._device = device
        self._jobs: deque[Callable[[], object]] = deque()
        self.num_launched = 0
        self.num_done = 0

    def launch(self, job: Callable[[], object]) -> None:
        with self._device.lock:
            self._jobs.append(job)
            self.num_launched += 1

    def run(self, until: int) -> None:
        with self._device.lock, _disable_current_modes():  # type: ignore[no-untyped-call]
            while self.num_done < until:
                self.num_done += 1
                self._jobs.popleft()()

    def wait_event(self, event: Event) -> None:
        self.launch(event.synchronize)


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self._at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self._at = stream, stream.num_launched

    def synchronize(self) -> None:
        assert self._at is not None
        self._at[0].run(self._at[1])

    def query(self) -> bool:
        """Lets the device run one more job, then returns whether the event is reached."""
        assert self._at is not None
        stream, place = self._at
        is_reached = stream.num_done >= place
        stream.run(min(place, stream.num_done + 1))
        return is_reached


class _Launches(TorchDispatchMode):
    """Records operators called within the block on the stream, instead of running them."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ANSWERS_HOST:
            self._stream.run(self._stream.num_launched)
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._stream.launch(lambda: func(*args, **kwargs))
            return args[0] if func._schema.returns else None
        out = func(*args, **kwargs)
        inputs = [each for arg in args for each in (arg if isinstance(arg, (tuple, list)) else [arg])]
        if func.is_view or not any(isinstance(each, torch.Tensor) for each in inputs):
            return out
        self._stream.launch(lambda: refill(out, func(*args, **kwargs)))  # with its inputs' current content
        return out


class FakeModule:
    """The part of torch.cuda or torch.npu that device.py uses.

    `compute[i]` is every thread's default stream on device i.
    """

    Event = Event

    def __init__(self, num_devices: int = 2) -> None:
        self.lock = threading.RLock()
        self.compute = [Stream(self) for _ in range(num_devices)]
        self.num_devices = num_devices
        self.streams = list(self.compute)
        self._current = threading.local()
        self.peers_can_read = True

    def Stream(self, index: int, priority: int = 0) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            with _Launches(stream):
                yield
        finally:
            self._current.stream = before

    def current_stream(self, index: int) -> Stream:
        found: Stream | None = getattr(self._current, "stream", None)
        return found or self.compute[index]

    def set_device(self, index: int) -> None: ...

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{index}")

    def can_device_access_peer(self, index: int, other: int) -> bool:
        return self.peers_can_read

    def launch(self, index: int, job: Callable[[], object]) -> None:
        """Launches a model's kernel on that device."""
        self.compute[index].launch(job)

    def finish(self) -> None:
        """Runs all recorded work."""
        for stream in list(self.streams):
            stream.run(stream.num_launched)

    @property
    def num_open(self) -> int:
        return sum(stream.num_launched - stream.num_done for stream in self.streams)


def install(patch: Any) -> FakeModule:
    """Installs the fake devices, and a fake NCCL or HCCL between them. `patch`: pytest's MonkeyPatch."""
    fake = FakeModule()
    patch.setattr(FakeGroup, "device", fake, raising=False)
    patch.setattr(FakeGroup, "made", [])
    patch.setattr(FakeGroup, "wires", {})
    patch.setattr(FakeGroup, "meetings", {})
    patch.setattr(devices, "process_group", lambda device: FakeHccl if device.kind == "npu" else FakeGroup)
    patch.setattr(device_pair, "_number_on", lambda device: torch.zeros(1))
    patch.setattr(devices, "_module", lambda device: fake)
    patch.setattr(devices, "num_cuda_devices", lambda: fake.num_devices)
    patch.setattr(devices, "num_npu_devices", lambda: fake.num_devices)
    patch.setattr(device_streams, "_current", threading.local())
    with fake.stream(fake.Stream(0)):  # torch's first dispatch mode takes a second
        torch.zeros(1).clone()
    fake.finish()
    return fake


def put_on(pool: KVPool, index: int = 0, kind: DeviceKind = "cuda") -> KVPool:
    """Makes the pool report this device and use its layout; its memory remains on the host."""
    pool.device = Device(kind, index)
    if kind == "npu":
        before, layout = pool.memory, pool.layout
        shapes = LayerMajor.shapes(layout, len(before))
        pool.memory = LayerMajor(
            layout, [_in_memfd(torch.zeros(shape, dtype=before.parts[0].dtype)) for shape in shapes]
        )
        for layer in range(layout.num_layers):
            for plane, content in zip(pool.memory.planes(layer), before.planes(layer), strict=True):
                plane.copy_(content)
    else:
        _fds[pool.memory.parts[0].data_ptr()] = pool.fd
        pool.memory = DeviceBlocks(pool.layout, pool.memory.parts)
    return pool


def content(pool: KVPool) -> torch.Tensor:
    """Returns the pool's current content in block-major layout, as a view if it is block-major."""
    if not isinstance(pool.memory, LayerMajor):
        return pool.data
    return torch.stack([layer.transpose(0, 1) for layer in pool.memory.layers], dim=1)


def fill(pool: KVPool, blocks: slice, value: float, layers: slice = slice(None)) -> None:
    """Fills blocks immediately, before the device's pending work."""
    for layer in range(pool.layout.num_layers)[layers]:
        for plane in pool.memory.planes(layer):
            plane[blocks] = value


_fds: dict[int, int] = {}  # start address -> memory's descriptor


def _in_memfd(tensor: torch.Tensor) -> torch.Tensor:
    nbytes = tensor.numel() * tensor.element_size()
    fd = os.memfd_create("layer", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    copy = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    weakref.finalize(copy, os.close, fd)
    _fds[copy.data_ptr()] = fd
    return copy


class MemfdMemory:
    """A device's memory as received by another process: the handle names a file descriptor."""

    def export(self, tensor: torch.Tensor) -> MemoryPart:
        path = f"/proc/{os.getpid()}/fd/{_fds[tensor.data_ptr()]}".encode()
        return MemoryPart(
            handle=b"\x03c" + path.ljust(64, b"\0"), nbytes=tensor.numel() * tensor.element_size(), offset_nbytes=0
        )

    def map(self, part: MemoryPart, dtype: torch.dtype, shape: tuple[int, ...], device: Device) -> torch.Tensor:
        fd = os.open(part.handle[2:].rstrip(b"\0").decode(), os.O_RDONLY)
        try:
            view = mmap.mmap(fd, part.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.frombuffer(view, dtype=dtype).view(shape)


class FakeGroup:
    """ProcessGroupNCCL between two ends in one process. A call runs after the launches before it, without a wait."""

    keeps_errors = False  # an error is raised only when the call is queried

    class Options:
        _timeout: object = None
        is_high_priority_stream = False
        hccl_config: dict[str, int] = {}  # noqa: RUF012
        group_id = ""
        global_ranks_in_group: list[int] = []  # noqa: RUF012

    wires: dict[str, queue.SimpleQueue[torch.Tensor | None]] = {}  # noqa: RUF012
    meetings: dict[str, threading.Barrier] = {}  # noqa: RUF012
    made: list[FakeGroup] = []  # noqa: RUF012
    device: FakeModule

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        if rank == 0:
            name = str(len(FakeGroup.wires))
            FakeGroup.wires[name] = queue.SimpleQueue()
            FakeGroup.meetings[name] = threading.Barrier(2)
            store.set("wire", name)
        self.rank, self.options = rank, options
        self.calls: list[tuple[str, int]] = []  # calls and their bytes
        name = store.get("wire").decode()
        self._wire, self._meeting = FakeGroup.wires[name], FakeGroup.meetings[name]
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.aborted = threading.Event()
        self.is_shut_down = False
        FakeGroup.made.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._jobs.get()()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        self.calls.append(("send", len(tensors[0])))
        return self._later(lambda: self._wire.put(tensors[0].clone()))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        self.calls.append(("recv", len(tensors[0])))

        def take() -> None:
            while not self.aborted.is_set():
                with contextlib.suppress(queue.Empty):
                    if (payload := self._wire.get(timeout=0.01)) is None:
                        raise RuntimeError("remote process exited")
                    tensors[0].copy_(payload)
                    return

        return self._later(take)

    def _later(self, job: Callable[[], None]) -> FakeWork:
        before, work = Event(), FakeWork(self.keeps_errors)
        before.record(FakeGroup.device.current_stream(0))

        def run() -> None:
            before.synchronize()
            try:
                job()
            except RuntimeError as error:
                work.error = error
            if not self.aborted.is_set():
                work.done.set()

        self._jobs.put(run)
        return work

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        self.is_shut_down = True


class FakeHccl(FakeGroup):
    """Like HCCL: a call blocks until the other end joins, without a limit."""

    keeps_errors = True

    def abort(self) -> None:
        """Does nothing, like the method that torch-npu's class inherits."""

    def abort_hccl_comm(self, reason: str | None) -> None:
        self.abort_reason = reason
        self.aborted.set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._meeting.wait(10.0)
        return self._later(lambda: None)


class FakeWork:
    def __init__(self, keeps_errors: bool) -> None:
        self.done = threading.Event()
        self.error: RuntimeError | None = None
        self._keeps_errors = keeps_errors

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        if self.error is not None and not self._keeps_errors:
            raise self.error

    def is_success(self) -> bool:
        assert self._keeps_errors, "NCCL's does not answer"
        return self.error is None
