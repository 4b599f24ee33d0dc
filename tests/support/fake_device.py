"""A device that does nothing before somebody waits for it: streams and events over CPU tensors.

What is launched on a stream is written down and done when an event behind it is waited for (or asked again and again),
never earlier. So whoever reads or tells too early is found out, whatever the machine's speed. Stands where device.py
expects torch's module of a device; the memory of another process is a memfd.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pd_cluster import device as devices
from pd_cluster.device import Device
from pd_cluster.kv.pool import KVPool
from pd_cluster.wire import PoolExport

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
        """Every question gives the device time for one more job."""
        assert self._at is not None
        stream, place = self._at
        is_reached = stream.num_done >= place
        stream.run(min(place, stream.num_done + 1))
        return is_reached


class _Launches(TorchDispatchMode):
    """What is called inside is launched instead."""

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
        outs = out if isinstance(out, (tuple, list)) else [out]
        self._stream.launch(lambda: self._again(func, args, kwargs, outs))
        return out

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, outs: Any) -> None:
        """With what its inputs hold now."""
        fresh = func(*args, **kwargs)
        for to, of in zip(outs, fresh if isinstance(fresh, (tuple, list)) else [fresh], strict=True):
            to.copy_(of)


class FakeModule:
    """torch.cuda, as far as device.py uses it. `compute[i]` is every thread's current stream on device i, unless it
    says otherwise."""

    Event = Event

    def __init__(self, num_devices: int = 2) -> None:
        self.lock = threading.RLock()
        self.compute = [Stream(self) for _ in range(num_devices)]
        self.num_devices = num_devices
        self.streams = list(self.compute)
        self._current = threading.local()
        self.peers_can_read = True

    def Stream(self, index: int) -> Stream:
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
        """A kernel of the model on that device."""
        self.compute[index].launch(job)

    def finish(self) -> None:
        """Everything is over."""
        for stream in list(self.streams):
            stream.run(stream.num_launched)

    @property
    def num_open(self) -> int:
        return sum(stream.num_launched - stream.num_done for stream in self.streams)


def install(patch: Any) -> FakeModule:
    """The devices, and an NCCL between them. `patch`: pytest's MonkeyPatch."""
    fake = FakeModule()
    patch.setattr(FakeNccl, "device", fake, raising=False)
    patch.setattr(FakeNccl, "made", [])
    patch.setattr(FakeNccl, "wires", {})
    patch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    patch.setattr(devices, "_module", lambda device: fake)
    patch.setattr(devices, "num_cuda_devices", lambda: fake.num_devices)
    with fake.stream(fake.Stream(0)):  # torch needs a second for its first dispatch mode
        torch.zeros(1).clone()
    fake.finish()
    return fake


def on_gpu(pool: KVPool, index: int = 0) -> KVPool:
    """As if it were on that device; its memory stays where it is."""
    pool.device = Device("cuda", index)
    return pool


class MemfdMemory:
    """Memory of a device as another process gets it: here the handle names a descriptor."""

    def export(self, pool: KVPool) -> PoolExport:
        path = f"/proc/{os.getpid()}/fd/{pool.fd}".encode()
        nbytes = pool.data.numel() * pool.data.element_size()
        return PoolExport(
            handle=b"\x03c" + path.ljust(64, b"\0"),
            nbytes=nbytes,
            offset_nbytes=0,
            block_nbytes=pool.layout.block_nbytes,
        )

    def map(self, export: PoolExport, device: Device) -> torch.Tensor:
        fd = os.open(export.handle[2:].rstrip(b"\0").decode(), os.O_RDONLY)
        try:
            view = mmap.mmap(fd, export.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.frombuffer(view, dtype=torch.uint8)


class FakeNccl:
    """ProcessGroupNCCL between two ends in one process: calls go on by themselves, behind what was launched before."""

    class Options:
        _timeout: object = None

    wires: dict[str, queue.SimpleQueue[torch.Tensor | None]] = {}  # noqa: RUF012
    made: list[FakeNccl] = []  # noqa: RUF012
    device: FakeModule

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        if rank == 0:
            name = str(len(FakeNccl.wires))
            FakeNccl.wires[name] = queue.SimpleQueue()
            store.set("wire", name)
        self._wire = FakeNccl.wires[store.get("wire").decode()]
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.aborted = threading.Event()
        self.is_shut_down = False
        FakeNccl.made.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._jobs.get()()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        return self._later(lambda: self._wire.put(tensors[0].clone()))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        def take() -> None:
            while not self.aborted.is_set():
                with contextlib.suppress(queue.Empty):
                    if (payload := self._wire.get(timeout=0.01)) is None:
                        raise RuntimeError("remote process exited")
                    tensors[0].copy_(payload)
                    return

        return self._later(take)

    def _later(self, job: Callable[[], None]) -> FakeWork:
        before, work = Event(), FakeWork()
        before.record(FakeNccl.device.current_stream(0))

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


class FakeWork:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
