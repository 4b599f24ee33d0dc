"""Finds, selects and queries devices in torch. Only this module passes names of devices to torch.

Imports torch only inside functions, because a worker's parent checks names here and must not load torch. Imports
torch_npu when an NPU is requested, by name or because this machine has NPUs and no GPU. device_streams.py launches and
orders work on devices.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_cluster import host
from pd_cluster.devices.device_kinds import BY_KIND, DeviceKind, Kind
from pd_cluster.errors import ConfigError, called, first_line

NPU_FILES = "/dev/davinci[0-9]*"
NPU_VISIBILITY = "ASCEND_RT_VISIBLE_DEVICES"

KINDS: tuple[DeviceKind, ...] = tuple(BY_KIND)


@dataclass(frozen=True, slots=True)
class Device:
    """A device that one rank process computes on. `index` counts visible devices; device_kinds.py has its traits."""

    kind: DeviceKind
    index: int = 0

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def traits(self) -> Kind:
        return BY_KIND[self.kind]

    @property
    def dist_backend(self) -> str:
        return self.traits.dist_backend

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"


CPU = Device("cpu")


class MemoryInfo(NamedTuple):
    """The memory of one device, in bytes. `free`: memory that no process holds."""

    free: int
    total: int


def check_name(name: str) -> None:
    """Checks `--device` without torch. Raises ConfigError for an unknown name."""
    if name not in ("auto", *KINDS):
        raise ConfigError(f"{called('device')} {name}: expected auto, {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def resolve(name: str) -> Device:
    """Returns the first device of the kind in `--device`; `auto`: a kind that this machine has. Raises ConfigError."""
    return bind(name, (), 0)


def bind(name: str, device_ids: Sequence[str], rank: int) -> Device:
    """Returns the device of one rank of an instance, given its devices in the rank table. Raises ConfigError.

    A container that mounts cards 4 and 5 sees them as 0 and 1. Therefore, if as many devices are visible as the table
    lists, rank i gets the i-th visible one; otherwise it gets the device whose number is the i-th device_id in
    ascending order. Sets no visibility variable. Without `device_ids`, returns the first device.
    """
    check_name(name)
    kind = _kind_here() if name == "auto" else next(each for each in KINDS if each == name)
    if kind == "cpu":
        return CPU
    found, why = (num_cuda_devices(), _why_no_cuda) if kind == "cuda" else (num_npu_devices(), _why_no_npu)
    if not found:
        place = f"torch finds no {kind.upper()} device here ({why()})"
        raise ConfigError(f"{called('device')} {name}: {place}; use {called('device')} cpu")
    index = rank
    if device_ids and found != len(device_ids):
        index = _numbers(device_ids, kind)[rank]
    if index >= found:
        raise ConfigError(
            f"{called('device')} {name}: the rank table gives rank {rank} device_id {index}, and {found} "
            f"{kind.upper()} devices are visible here; make the table's devices visible, or correct its device_id"
        )
    return Device(kind, index)


def _kind_here() -> DeviceKind:
    """Returns CUDA if torch finds a GPU; NPU if the driver shows one, even if its use then raises an error."""
    if num_cuda_devices():
        return "cuda"
    return "npu" if npu_files() else "cpu"


def _numbers(device_ids: Sequence[str], kind: DeviceKind) -> list[int]:
    try:
        return sorted(map(int, device_ids))
    except ValueError:
        raise ConfigError(f"device_id {', '.join(device_ids)}: {BY_KIND[kind].noun} is named by its number") from None


def _why_no_cuda() -> str:
    import torch

    return "it is built without CUDA" if torch.version.cuda is None else "no driver, or none is visible"


def num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def npu_files() -> list[str]:
    """Returns the driver's files for NPUs, one for each card that this process may use."""
    return sorted(glob.glob(NPU_FILES))


def num_npu_devices() -> int:
    """Counts visible NPUs; 0 if torch-npu cannot be imported."""
    return 0 if _npu_problem() else int(_npu().device_count())


@functools.cache
def _npu_problem() -> str:
    """Imports torch-npu; returns why it is not available, or ""."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch-npu is not installed: pip install 'pd-cluster[npu]'"
    try:
        _npu()
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch-npu cannot be imported: {first_line(error)}; is CANN's set_env.sh sourced?"
    return ""


def _why_no_npu() -> str:
    if problem := _npu_problem():
        return problem
    if visible := os.environ.get(NPU_VISIBILITY):
        return f"{NPU_VISIBILITY}={visible}: a container numbers its mounted cards from 0; unset this variable"
    return "no /dev/davinci* is mounted" if not npu_files() else "the driver shows none"


def _npu() -> Any:
    """Returns torch.npu, which torch_npu provides."""
    return importlib.import_module("torch_npu").npu


def use(device: Device) -> None:
    """Makes the device the default for allocations and launches on every thread that calls this.

    Raises ConfigError when the device is unavailable.
    """
    if not device.is_accelerator:
        return
    try:
        _module(device).set_device(device.index)
    except RuntimeError as error:
        raise ConfigError(
            f"{device.torch_name} cannot be used: {first_line(error)}; does another process or container have it?"
        ) from error


def memory(device: Device) -> MemoryInfo:
    """Returns an accelerator's memory, counting all processes."""
    return MemoryInfo(*_module(device).mem_get_info(device.index))


def reserved_nbytes(device: Device) -> int:
    """Releases this process's unused memory of an accelerator, and returns the bytes that its allocator still holds."""
    _module(device).empty_cache()
    return int(_module(device).memory_reserved(device.index))


def peak_nbytes(device: Device) -> int:
    """Returns the maximum bytes that this process's allocator has held of an accelerator since `reset_peak`."""
    return int(_module(device).max_memory_reserved(device.index))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that an accelerator was out of memory, even if it hides the allocator's error.

    During capture or instantiation of a graph, the driver raises its own errors, and the end of a capture can hide
    the allocator's error.
    """
    import torch

    hidden = error.__context__
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in str(error).lower()
        or (hidden is not None and is_out_of_memory(hidden))
    )


def pinned_nbytes(device: Device) -> int | None:
    """Returns the bytes of pinned host memory that this process's allocator has taken from the driver.

    This is more than was asked for, because the allocator rounds each block up to a power of two. None if torch does
    not report the bytes.
    """
    stats = getattr(_module(device), "host_memory_stats", None)
    return None if stats is None else int(stats().get("allocated_bytes.current", 0))


def reset_peak(device: Device) -> None:
    _module(device).empty_cache()
    _module(device).reset_peak_memory_stats(device.index)


def product(device: Device) -> str:
    """Returns an accelerator's product name, by its driver."""
    return str(_module(device).get_device_name(device.index))


def uuid(device: Device) -> str:
    """Returns an accelerator's id, which is the same in all processes of the host; "" if the driver has none."""
    name = str(_module(device).get_device_properties(device.index).uuid)
    return name if name.strip("0-") else ""


def with_uuid(kind: DeviceKind, wanted: str) -> Device | None:
    """Returns the visible device with this `uuid`, if any."""
    if not wanted:
        return None
    num_visible = {"cpu": lambda: 0, "cuda": num_cuda_devices, "npu": num_npu_devices}[kind]()
    return next((each for each in (Device(kind, at) for at in range(num_visible)) if uuid(each) == wanted), None)


def can_read(device: Device, other: Device) -> bool:
    """Whether code on `device` can read the memory of `other`."""
    return device == other or bool(_module(device).can_device_access_peer(device.index, other.index))


def expands_segments() -> str:
    """Returns the setting, if any, that lets torch's allocations grow; other processes cannot map such memory."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"{name}={os.environ[name]}"
    return ""


def num_multiprocessors(device: Device) -> int:
    """Counts multiprocessors; 1 on CPU."""
    return _module(device).get_device_properties(device.index).multi_processor_count if device.is_accelerator else 1


def compute_capability(device: Device) -> tuple[int, int]:
    """Returns a CUDA device's compute capability; on CPU, where kernels are interpreted, returns Hopper's."""
    if not device.is_accelerator:
        return 9, 0
    properties = _module(device).get_device_properties(device.index)
    return properties.major, properties.minor


def synchronize(device: Device) -> None:
    """Waits for all launched work of all threads. Call it only before other threads launch work, or between captures.

    It invalidates any graph that another thread is capturing on this device, whatever the mode of the capture. Threads
    that load something while steps run wait for a mark instead (device_streams.py).
    """
    if device.is_accelerator:
        _module(device).synchronize(device.index)


def _module(device: Device) -> Any:
    """Returns torch.cuda or torch.npu, which have the same functions."""
    import torch

    assert device.is_accelerator
    return torch.cuda if device.kind == "cuda" else _npu()


def process_group(device: Device) -> Any:
    """Returns torch's class of process groups for such accelerators: ProcessGroupNCCL, ProcessGroupHCCL, or None."""
    if device.kind != "npu":
        return getattr(importlib.import_module("torch._C._distributed_c10d"), "ProcessGroupNCCL", None)
    if _npu_problem():
        return None
    return getattr(importlib.import_module("torch_npu")._C._distributed_c10d, "ProcessGroupHCCL", None)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def available_nbytes(device: Device) -> int:
    """Returns the bytes free for new allocations; on CPU the host's, within this process's control groups."""
    return memory(device).free if device.is_accelerator else host.memory().available


def num_threads_for(num_local_ranks: int) -> int:
    """Returns the number of compute threads of one rank process if this many share the host's cores."""
    return max(1, host.num_cores() // max(1, num_local_ranks))
