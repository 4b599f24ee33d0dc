"""Shares a device's memory with another process: P exports a handle, and D maps the memory."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec
import torch

from pd_cluster.devices.device import Device

EVENT_NBYTES = 64
NO_COUNTER = b"/pd-cluster-counts-nothing"  # torch looks for this file in /dev/shm, and continues without it


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an allocation.

    `handle` identifies the allocation to the driver; the part begins at `offset_nbytes` in it.
    """

    handle: Annotated[bytes, msgspec.Meta(max_length=512)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    offset_nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class DeviceMemory(Protocol):
    """Exports and maps memory of a device. Tests substitute a memfd."""

    def export(self, tensor: torch.Tensor) -> MemoryPart:
        """Exports a tensor's whole storage. Raises RuntimeError."""

    def map(self, part: MemoryPart, dtype: torch.dtype, shape: tuple[int, ...], device: Device) -> torch.Tensor:
        """Maps as many of the exported bytes as this shape needs, for use on `device`. Raises RuntimeError."""


class TorchMemory:
    """Uses torch's own export of storages without its reference counts, because a pool lives as long as its process."""

    def export(self, tensor: torch.Tensor) -> MemoryPart:
        storage: Any = tensor.untyped_storage()
        untyped: Any = torch.UntypedStorage
        kind = tensor.device.type
        shared = getattr(storage, f"_share_{kind}_")()
        _, handle, nbytes, offset, counter, counter_at, _, _ = shared
        getattr(untyped, f"_release_ipc_counter_{kind}")(counter, counter_at)
        return MemoryPart(handle=handle, nbytes=nbytes, offset_nbytes=offset)

    def map(self, part: MemoryPart, dtype: torch.dtype, shape: tuple[int, ...], device: Device) -> torch.Tensor:
        """Maps the memory for D's own device, which runs the copies, even if P uses another device."""
        untyped: Any = torch.UntypedStorage
        make = getattr(untyped, f"_new_shared_{device.kind}")
        place = (device.index, part.handle, part.nbytes, part.offset_nbytes)
        storage = make(*place, NO_COUNTER, 0, bytes(EVENT_NBYTES), False)
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        return torch.empty(0, dtype=dtype, device=device.torch_name).set_(storage, 0, shape, stride)
