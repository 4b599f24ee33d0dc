"""Pools on accelerators of one host, in different processes: D maps P's memory and copies from it (see local.py).

What the driver calls a handle of P's pool is fetched over an abstract Unix socket (unix.py), whose name travels over
the authenticated link, as a typed message of bounded size. Nothing of it is executed or looked up by name: D maps
exactly as many bytes as P's layout and number of blocks make, or refuses. A pool that lies by layers, as on NPUs, has a
handle for each of them.

The socket stays open. Its end tells D that P's process is gone, and with it the right to read that memory: from then on
no copy is launched.
"""

from __future__ import annotations

import logging
import socket
from typing import Any, Protocol

import msgspec
import torch

from pd_cluster import device as devices
from pd_cluster.device import Device
from pd_cluster.errors import LinkError, first_line
from pd_cluster.kv.layered import LayerMajor, layer_shape
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import NUM_EXTRA_BLOCKS, TORCH_DTYPES, KVPool, Memory, shape_of
from pd_cluster.transport import unix
from pd_cluster.transport.base import Checksum
from pd_cluster.transport.copies import SETTLE_S
from pd_cluster.transport.local import OneSidedReceiver
from pd_cluster.wire import (
    MAX_EXPORT_NBYTES,
    KVChunk,
    MemoryPart,
    PoolExport,
    TransportName,
    TransportOffer,
    decode_export,
)

log = logging.getLogger(__name__)

# On CUDA torch's: its version, "c" for memory of cudaMalloc ("e" is an expandable segment), then what the driver made.
# On NPUs what the driver made, whose form is nobody else's business.
HANDLE_NBYTES, KIND_AT, PLAIN_KIND = 66, 1, b"c"
EVENT_NBYTES = 64
NO_COUNTER = b"/pd-cluster-counts-nothing"  # torch looks for a file of this name in /dev/shm, and goes on without it


class DeviceMemory(Protocol):
    """How memory of a device becomes another process's; tests put a memfd in its place."""

    def export(self, tensor: torch.Tensor) -> MemoryPart:
        """Of all its storage. Raises RuntimeError."""

    def map(self, part: MemoryPart, dtype: torch.dtype, shape: tuple[int, ...], device: Device) -> torch.Tensor:
        """The exported bytes, as many as this shape has, as seen by what runs on `device`. Raises RuntimeError."""


class TorchMemory:
    """By torch's own export of storages, without its counting of who has them: a pool lives as long as its process."""

    def export(self, tensor: torch.Tensor) -> MemoryPart:
        storage: Any = tensor.untyped_storage()
        untyped: Any = torch.UntypedStorage
        on_npu = tensor.device.type == "npu"
        shared = storage._share_npu_() if on_npu else storage._share_cuda_()
        _, handle, nbytes, offset, counter, counter_at, _, _ = shared
        release = untyped._release_ipc_counter_npu if on_npu else untyped._release_ipc_counter_cuda
        release(counter, counter_at)
        return MemoryPart(handle=handle, nbytes=nbytes, offset_nbytes=offset)

    def map(self, part: MemoryPart, dtype: torch.dtype, shape: tuple[int, ...], device: Device) -> torch.Tensor:
        """On D's own device, whichever P's is: what D launches there reads it."""
        untyped: Any = torch.UntypedStorage
        make = untyped._new_shared_npu if device.kind == "npu" else untyped._new_shared_cuda
        place = (device.index, part.handle, part.nbytes, part.offset_nbytes)
        storage = make(*place, NO_COUNTER, 0, bytes(EVENT_NBYTES), False)
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        return torch.empty(0, dtype=dtype, device=device.torch_name).set_(storage, 0, shape, stride)


class ExportServer(unix.UnixServer):
    """Hands out what maps the pool. Raises LinkError when this memory cannot be handed out."""

    def __init__(self, pool: KVPool, memory: DeviceMemory) -> None:
        if setting := devices.expands_segments():
            raise LinkError(f"{setting}: no other process can map a pool that may grow; take expandable_segments out")
        try:
            parts = [memory.export(each) for each in _tensors_of(pool.memory)]
        except RuntimeError as error:
            raise LinkError(f"the pool cannot be exported: {first_line(error)}") from error
        self._message = msgspec.msgpack.encode(PoolExport(parts=parts, block_nbytes=pool.layout.block_nbytes))
        super().__init__(keeps=True)

    def _give(self, peer: socket.socket) -> None:
        peer.sendall(len(self._message).to_bytes(4, "big") + self._message)


class IpcReceiver(OneSidedReceiver):
    """D's end: maps P's pool into this device's addresses."""

    name: TransportName = "ipc"

    def __init__(
        self,
        offer: TransportOffer,
        pool: KVPool,
        peer: KVLayout,
        num_peer_blocks: int,
        checksum: Checksum,
        timeout_s: float,
        memory: DeviceMemory,
        settle_s: float = SETTLE_S,
    ) -> None:
        super().__init__(offer, pool, peer, checksum, settle_s)
        self._device_uuid = offer.device_uuid
        self._num_blocks = num_peer_blocks + NUM_EXTRA_BLOCKS
        self._timeout_s = timeout_s
        self._memory = memory
        self._peer: socket.socket | None = None

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        if self._peer is None or unix.has_hung_up(self._peer):
            raise LinkError("the prefill instance's process has ended, and its device memory with it", retry=True)
        super().receive(sequence, chunk, into)

    def close(self) -> None:
        super().close()
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _source(self) -> Memory:
        self._check_device()
        layout = self._route.source
        has_layers = isinstance(self._pool.memory, LayerMajor)  # as P's pool: it is on a device of the same kind
        num_parts = layout.num_layers if has_layers else 1
        self._peer = unix.connect(self._address, "device memory", self._timeout_s)
        export = self._checked(_read(self._peer, MAX_EXPORT_NBYTES * num_parts), num_parts)
        shape = layer_shape(layout, self._num_blocks) if has_layers else shape_of(layout, self._num_blocks)
        dtype = TORCH_DTYPES[layout.dtype]
        try:
            found = [self._memory.map(part, dtype, shape, self._pool.device) for part in export.parts]
        except RuntimeError as error:
            raise LinkError(f"the prefill instance's device memory cannot be mapped: {first_line(error)}") from error
        return LayerMajor(found) if has_layers else found[0]

    def _check_device(self) -> None:
        """Raises LinkError."""
        own = self._pool.device
        other = devices.with_uuid(own.kind, self._device_uuid)
        if other is None:
            raise LinkError(
                f"the prefill instance's device {self._device_uuid or 'without a name'} is not visible here"
            )
        if not devices.can_read(own, other):
            raise LinkError(f"{own.torch_name} cannot read the prefill instance's device {self._device_uuid}")

    def _checked(self, export: PoolExport, num_parts: int) -> PoolExport:
        """Whether it is what P's layout makes. Raises LinkError."""
        block_nbytes = self._route.source.block_nbytes
        wanted = self._num_blocks * block_nbytes // num_parts
        if len(export.parts) != num_parts:
            raise LinkError(f"the prefill instance's pool is in {len(export.parts)} parts, not in {num_parts}")
        for part in export.parts:
            if (part.nbytes, export.block_nbytes) != (wanted, block_nbytes):
                raise LinkError(
                    f"the prefill instance's pool is {part.nbytes} bytes in blocks of {export.block_nbytes}, "
                    f"not {wanted} in blocks of {block_nbytes}"
                )
            if self._pool.device.kind == "cuda":
                _check_handle(part.handle)
        return export


def _tensors_of(memory: Memory) -> list[torch.Tensor]:
    return memory.layers if isinstance(memory, LayerMajor) else [memory]


def _check_handle(handle: bytes) -> None:
    """Raises LinkError."""
    kind = handle[KIND_AT : KIND_AT + 1]
    if len(handle) != HANDLE_NBYTES or kind != PLAIN_KIND:
        raise LinkError(
            f"the prefill instance's handle of {len(handle)} bytes, kind {kind!r}, is none of plain device "
            f"memory (another version of torch, or expandable segments)"
        )


def _read(peer: socket.socket, most_nbytes: int) -> PoolExport:
    """Raises LinkError."""
    try:
        nbytes = int.from_bytes(_read_exactly(peer, 4), "big")
        if nbytes > most_nbytes:
            raise LinkError(f"the prefill instance describes its device memory with {nbytes} bytes")
        return decode_export(_read_exactly(peer, nbytes))
    except (OSError, EOFError) as error:
        what = str(error) or "it hung up (another user?)"
        raise LinkError(f"the prefill instance's device memory cannot be reached: {what}", retry=True) from error
    except msgspec.DecodeError as error:
        raise LinkError(f"the prefill instance's description of its device memory makes no sense: {error}") from error


def _read_exactly(peer: socket.socket, nbytes: int) -> bytes:
    """Raises OSError, EOFError."""
    data = b""
    while len(data) < nbytes:
        part = peer.recv(nbytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data
