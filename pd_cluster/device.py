"""The one place that names devices to torch: which kind, how many, which one is mine, its memory and its streams.

Imports torch only inside functions: a worker's parent checks names here and never loads it. NPU arrives with its own
issue of this interface; asking for it before that is refused here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pd_cluster.errors import ConfigError

# (limit, use) of this process's control group as containers see it, versions 2 and 1
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

DeviceKind = Literal["cpu", "cuda", "npu"]
KINDS = ("cpu", "cuda", "npu")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that one rank process computes on. `index` counts what this process sees."""

    kind: DeviceKind
    index: int = 0

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def dist_backend(self) -> str:
        return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[self.kind]

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"


CPU = Device("cpu")


class Memory(NamedTuple):
    """Bytes of one device. `free` counts what no process has."""

    free: int
    total: int


def check_name(name: str) -> None:
    """Of `--device`. Raises ConfigError for what this version does not know; needs no torch."""
    if name == "npu":
        raise ConfigError(f"--device {name}: this version serves on CPU and CUDA only; use one of these")
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected auto, cpu or cuda")


def resolve(name: str) -> Device:
    """`--device` to the first device of that kind; `auto` is CUDA where torch finds a GPU. Raises ConfigError."""
    return bind(name, (), 0)


def bind(name: str, device_ids: Sequence[str], rank: int) -> Device:
    """The device of one rank of an instance that the rank table gives these devices. Raises ConfigError.

    A container that mounts cards 4 and 5 sees them as 0 and 1. So where as many devices are visible as the table
    counts, rank i has the i-th; else it has the one whose number is the i-th device_id in ascending order. No
    visibility variable is set. Without `device_ids`: the first.
    """
    check_name(name)
    num_visible = 0 if name == "cpu" else num_cuda_devices()
    if name == "cpu" or (name == "auto" and not num_visible):
        return CPU
    if not num_visible:
        raise ConfigError(f"--device {name}: torch finds no CUDA device here ({_why_no_cuda()}); use --device cpu")
    index = rank
    if device_ids and num_visible != len(device_ids):
        index = _numbers(device_ids)[rank]
    if index >= num_visible:
        raise ConfigError(
            f"--device {name}: the rank table gives rank {rank} device_id {index}, and {num_visible} CUDA devices are "
            f"visible here; make the table's devices visible, or correct its device_id"
        )
    return Device("cuda", index)


def _numbers(device_ids: Sequence[str]) -> list[int]:
    try:
        return sorted(map(int, device_ids))
    except ValueError:
        raise ConfigError(f"device_id {', '.join(device_ids)}: a CUDA device is named by its number") from None


def _why_no_cuda() -> str:
    import torch

    return "it is built without CUDA" if torch.version.cuda is None else "no driver, or none is visible"


def num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use(device: Device) -> None:
    """What this process allocates and launches without saying where goes there, on every thread that calls this."""
    if device.is_accelerator:
        _module(device).set_device(device.index)


def memory(device: Device) -> Memory:
    """Of an accelerator, all processes counted."""
    return Memory(*_module(device).mem_get_info(device.index))


def reserved_nbytes(device: Device) -> int:
    """What this process's allocator holds of an accelerator, once it has given back what nobody uses."""
    _module(device).empty_cache()
    return int(_module(device).memory_reserved(device.index))


def peak_nbytes(device: Device) -> int:
    """The most that this process's allocator has held of an accelerator since `reset_peak`."""
    return int(_module(device).max_memory_reserved(device.index))


def reset_peak(device: Device) -> None:
    _module(device).empty_cache()
    _module(device).reset_peak_memory_stats(device.index)


def uuid(device: Device) -> str:
    """Names an accelerator to every process of the host, whatever each of them sees."""
    return str(_module(device).get_device_properties(device.index).uuid)


def with_uuid(kind: DeviceKind, wanted: str) -> Device | None:
    """The device that `uuid` names so, if this process sees it."""
    num_visible = num_cuda_devices() if kind == "cuda" else 0
    return next((each for each in (Device(kind, at) for at in range(num_visible)) if uuid(each) == wanted), None)


def can_read(device: Device, other: Device) -> bool:
    """Whether what runs on `device` can read the memory of `other`."""
    return device == other or bool(_module(device).can_device_access_peer(device.index, other.index))


def expands_segments() -> str:
    """The setting that makes torch's allocator grow its allocations, which no other process can map; "" without."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"{name}={os.environ[name]}"
    return ""


def num_multiprocessors(device: Device) -> int:
    """1 on CPU."""
    return _module(device).get_device_properties(device.index).multi_processor_count if device.is_accelerator else 1


def compute_capability(device: Device) -> tuple[int, int]:
    """Of a CUDA device; on CPU, where kernels are interpreted, that of Hopper."""
    if not device.is_accelerator:
        return 9, 0
    properties = _module(device).get_device_properties(device.index)
    return properties.major, properties.minor


def synchronize(device: Device) -> None:
    """Waits for everything that was launched."""
    if device.is_accelerator:
        _module(device).synchronize(device.index)


def _module(device: Device) -> Any:
    """torch.cuda or its equal."""
    import torch

    assert device.is_accelerator
    return getattr(torch, device.kind)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = _module(device).Stream(device.index) if device.is_accelerator else None

    def after(self, marker: Marker) -> None:
        """What is launched here from now on begins when that is reached; the host does not wait."""
        if self._stream is not None and marker._event is not None:
            self._stream.wait_event(marker._event)

    def __enter__(self) -> SideStream:
        """What is launched inside goes to this stream."""
        if self._stream is not None:
            self._context = _module(self._device).stream(self._stream)
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
    return _recorded(device, _module(device).current_stream(device.index) if device.is_accelerator else None)


def _recorded(device: Device, stream: Any) -> Marker:
    if stream is None:
        return Marker(None)
    event = _module(device).Event(blocking=True)  # whoever waits sleeps: the other threads need the core
    event.record(stream)
    return Marker(event)


def capture(device: Device) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """What makes a graph of an accelerator's launches: called with what launches, it returns what launches all again.

    Both return the same tensors. The graphs share their memory: what one returned, the next overwrites.
    """
    module = _module(device)
    memory_pool = module.graph_pool_handle()

    def make(run: Callable[[], Any]) -> Callable[[], Any]:
        side = SideStream(device)
        side.after(mark(device))  # of this thread's own stream, before the side's takes its place
        with side:  # once as it is: kernels are compiled and loaded, which no capture can hold
            run()
        synchronize(device)
        graph = module.CUDAGraph()
        # Other threads copy meanwhile: only this one's launches are captured, and may not wait.
        with module.graph(graph, pool=memory_pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    return make


def available_nbytes(device: Device) -> int:
    """Memory that new allocations on the device can have; on CPU the host's, within this process's control group."""
    if device.is_accelerator:
        return memory(device).free
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    for limit, used in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            available = min(available, int(Path(limit).read_text("ascii")) - int(Path(used).read_text("ascii")))
    return max(0, available)


def num_threads_for(num_local_ranks: int) -> int:
    """Compute threads of one rank process when that many share this host's cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_local_ranks))
