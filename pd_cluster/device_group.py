"""Process groups over accelerators, built directly: NCCL's on CUDA, HCCL's on NPUs. The one place where the two differ.

Knows nothing of what is sent or summed in them. torch's classes for both come from device.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, get_args

from pd_cluster import device as devices
from pd_cluster.device import Device

Backend = Literal["nccl", "hccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# A communicator of HCCL takes twice its buffer of the NPU's memory. For sums this is HCCL's own default. Of pairs there
# may be many, and two payloads (transport/dist.py) fit: one leaves the buffer while the next comes in.
TP_BUFFER_MB, PAIR_BUFFER_MB = 200, 64
P2P_BUFFER, NONE_OF_ITS_OWN = "P2P_HCCL_BUFFSIZE", "0"  # else sends get a communicator beside the group's

# What torch does with a group whose peer has died: end the group only, not this process. Read when a group is made.
ERROR_HANDLING: Mapping[Backend, str] = {
    "nccl": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "hccl": "TORCH_HCCL_ASYNC_ERROR_HANDLING",
}
CLEAN_UP_ONLY = "2"
SAME_BITS = "HCCL_DETERMINISTIC"  # else a sum may be another the next time: whoever comes first is added first


def why_none(backend: str, device: Device) -> str:
    """Why there can be no such group over this device; "" when there can."""
    if not device.is_accelerator:
        return "this instance's pool is in host memory"
    if device.dist_backend != backend or devices.process_group(device) is None:
        return f"torch has no {backend.upper()} for {device.torch_name} here"
    return ""


def make_pair(store: Any, name: str, rank: int, timeout_s: float, device: Device) -> Any:
    """Of two processes; the death of one is no reason for the other's. `name` is of no other group in this process."""
    os.environ.setdefault(ERROR_HANDLING[_backend(device)], CLEAN_UP_ONLY)
    if _backend(device) == "hccl":
        os.environ.setdefault(P2P_BUFFER, NONE_OF_ITS_OWN)
    return _make(store, name, rank, 2, timeout_s, device, PAIR_BUFFER_MB)


def make_ranks(store: Any, rank: int, size: int, timeout_s: float, device: Device) -> Any:
    """Of the ranks of one instance. What goes wrong in it, or takes longer than the timeout, ends the process."""
    if _backend(device) == "hccl":
        os.environ.setdefault(SAME_BITS, "true")
    return _make(store, "ranks", rank, size, timeout_s, device, TP_BUFFER_MB)


def finish(work: Any, device: Device) -> None:
    """Of work that is over. Raises RuntimeError when it has failed."""
    work.wait()  # raises NCCL's errors; HCCL's it keeps for itself
    if _backend(device) == "hccl" and not work.is_success():
        raise RuntimeError("HCCL reports an error; its own log says which")


def _make(store: Any, name: str, rank: int, size: int, timeout_s: float, device: Device, buffer_mb: int) -> Any:
    """Its communicator comes up with the first call."""
    devices.use(device)
    group_type = devices.process_group(device)
    options = group_type.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if _backend(device) == "hccl":
        options.hccl_config = {"hccl_buffer_size": buffer_mb}
        options.group_id = name  # HCCL knows communicators by it, and takes no two of one name
        # A group without this is torch-npu's global one: of all that RANK_TABLE_FILE lists, if that is set.
        options.global_ranks_in_group = list(range(size))
    return group_type(store, rank, size, options)


def _backend(device: Device) -> Backend:
    return "hccl" if device.kind == "npu" else "nccl"
