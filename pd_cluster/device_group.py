"""Process groups over accelerators, built directly: NCCL's on CUDA, HCCL's on NPUs. The one place where the two differ.

Knows nothing of what is sent or summed in them. torch's classes for both come from device.py, HCCL's environment from
hccl.py, by way of whoever started this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, get_args

from pd_cluster import device as devices
from pd_cluster.device import Device
from pd_cluster.hccl import GROUP_BUFFER_MB, PAIR_BUFFER_MB, hccl_config

Backend = Literal["nccl", "hccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# What torch does with a group whose peer has died: end the group only, not this process. Read when a group is made.
ERROR_HANDLING: Mapping[Backend, str] = {
    "nccl": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "hccl": "TORCH_HCCL_ASYNC_ERROR_HANDLING",
}
CLEAN_UP_ONLY = "2"


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
    return _make(store, name, rank, 2, timeout_s, device, PAIR_BUFFER_MB)


def make_ranks(store: Any, rank: int, size: int, timeout_s: float, device: Device) -> Any:
    """Of the ranks of one instance. What goes wrong in it, or takes longer than the timeout, ends the process.

    NCCL's sums are captured with the steps that they are part of, so their stream, too, must be of a priority that no
    copy has; see streams.py.
    """
    return _make(store, "ranks", rank, size, timeout_s, device, GROUP_BUFFER_MB, is_captured=True)


def finish(work: Any, device: Device) -> None:
    """Of work that is over. Raises RuntimeError when it has failed."""
    work.wait()  # raises NCCL's errors; HCCL's it keeps for itself
    if _backend(device) == "hccl" and not work.is_success():
        raise RuntimeError("HCCL reports an error; its own log says which")


def _make(
    store: Any,
    name: str,
    rank: int,
    size: int,
    timeout_s: float,
    device: Device,
    buffer_mb: int,
    is_captured: bool = False,
) -> Any:
    """Its communicator comes up with the first call."""
    devices.use(device)
    group_type = devices.process_group(device)
    options = group_type.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if _backend(device) == "hccl":
        options.hccl_config = hccl_config(buffer_mb)
        options.group_id = name  # HCCL knows communicators by it, and takes no two of one name
        # A group without this is torch-npu's global one: of all that RANK_TABLE_FILE lists, if that is set.
        options.global_ranks_in_group = list(range(size))
    elif is_captured:
        options.is_high_priority_stream = True
    return group_type(store, rank, size, options)


def _backend(device: Device) -> Backend:
    return "hccl" if device.kind == "npu" else "nccl"
