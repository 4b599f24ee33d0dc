"""Process groups over accelerators: NCCL's on CUDA, HCCL's on NPUs. Only this module distinguishes NCCL and HCCL.

Knows nothing of the data. torch's classes for both come from device.py. The parent of this process sets HCCL's
environment (hccl_environment.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device
from pd_cluster.devices.hccl_environment import (
    GROUP_BUFFER_MB,
    PAIR_BUFFER_MB,
    UNIT_BUFFER_MB,
    device_nbytes,
    hccl_config,
)

Backend = Literal["nccl", "hccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Variables that make torch end only the group, not this process, when a peer dies. Read when a group is created.
ERROR_HANDLING: Mapping[Backend, str] = {
    "nccl": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "hccl": "TORCH_HCCL_ASYNC_ERROR_HANDLING",
}
CLEAN_UP_ONLY = "2"


def why_none(backend: str, device: Device) -> str:
    """Returns why there cannot be such a group for this device; "" if there can."""
    if not device.is_accelerator:
        return "this instance's pool is in host memory"
    if device.dist_backend != backend or devices.process_group(device) is None:
        return f"torch has no {backend.upper()} for {device.torch_name} here"
    return ""


def make_pair(store: Any, name: str, rank: int, timeout_s: float, device: Device) -> Any:
    """Creates a group of two processes that survive each other's death. `name` must be unique in this process."""
    os.environ.setdefault(ERROR_HANDLING[_backend(device)], CLEAN_UP_ONLY)
    return _make(store, device, _Group(name, rank, 2, timeout_s, PAIR_BUFFER_MB))


def make_ranks(store: Any, rank: int, size: int, timeout_s: float, device: Device) -> Any:
    """Creates the group of one instance's ranks. An error in the group, or a call that exceeds the timeout, ends the
    process.

    Graphs capture NCCL's sums together with the step, so the group's stream needs a priority that no stream for copies
    has; see device_streams.py.
    """
    return _make(store, device, _Group("ranks", rank, size, timeout_s, GROUP_BUFFER_MB, is_captured=True))


def make_unit(store: Any, rank: int, size: int, timeout_s: float, device: Device) -> Any:
    """Creates the group of a unit's ranks that exchange rows; as in `make_ranks`, errors end the process. No graph
    captures its calls.
    """
    return _make(store, device, _Group("unit", rank, size, timeout_s, UNIT_BUFFER_MB))


def buffers_nbytes(device: Device, num_pairs: int, has_ranks: bool, has_unit: bool) -> int:
    """Returns the device memory of HCCL's communicators, outside of torch's allocator. NCCL's is not known."""
    return device_nbytes(num_pairs, has_ranks, has_unit) if device.dist_backend == "hccl" else 0


def finish(work: Any, device: Device) -> None:
    """Completes work that has ended. Raises RuntimeError if it failed."""
    work.wait()  # raises NCCL's errors, but not HCCL's
    if _backend(device) == "hccl" and not work.is_success():
        raise RuntimeError("HCCL reports an error; its own log says which")


def abort(group: Any, device: Device, reason: str) -> None:
    """Ends the group's work on this side, as far as its library can. `reason`: a text for the library's log.

    The `abort` of HCCL's class is inherited from torch and does nothing. HCCL's own method destroys the communicator,
    but work on the device may end later, so the memory that it uses must be kept until then.
    """
    if _backend(device) == "hccl":
        group.abort_hccl_comm(reason)
    else:
        group.abort()


class _Group(NamedTuple):
    name: str
    rank: int
    size: int
    timeout_s: float
    buffer_mb: int
    is_captured: bool = False


def _make(store: Any, device: Device, group: _Group) -> Any:
    """Creates a group, whose first call sets up the communicator."""
    devices.use(device)
    group_type = devices.process_group(device)
    options = group_type.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    if _backend(device) == "hccl":
        options.hccl_config = hccl_config(group.buffer_mb)
        options.group_id = group.name  # HCCL's name of the communicator; HCCL rejects a second one of this name
        # Otherwise torch-npu makes its global group, which contains all ranks of RANK_TABLE_FILE if that variable is
        # set.
        options.global_ranks_in_group = list(range(group.size))
    elif group.is_captured:
        options.is_high_priority_stream = True
    return group_type(store, group.rank, group.size, options)


def _backend(device: Device) -> Backend:
    return next(each for each in BACKENDS if each == device.dist_backend)
