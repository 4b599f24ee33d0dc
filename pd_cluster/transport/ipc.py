"""Pools on accelerators of one host, in different processes: D maps P's memory and copies from it (see one_sided.py).

D fetches the driver's handle of P's pool over an abstract Unix socket (unix_server.py), whose name P sends over the
authenticated link. The handle comes in a typed message of limited size, in which nothing is executed or looked up by
name: D maps exactly as many bytes as P's layout and number of blocks require, or refuses. A layer-major pool, as on
NPUs, has a handle for each layer.

The socket stays open. When it closes, P's process has ended and D may no longer read P's memory, so D launches no
further copy.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import Annotated

import msgspec

from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device
from pd_cluster.errors import LinkError, first_line
from pd_cluster.kv.kv_layout import DTYPE_NBYTES
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES, Memory
from pd_cluster.transport import unix_server
from pd_cluster.transport.device_memory import DeviceMemory, MemoryPart
from pd_cluster.transport.one_sided import OneSidedReceiver, OneSidedSender
from pd_cluster.transport.transport_interface import Checksum, KVReceiver, KVSender, LinkContext, Peer, PostKey
from pd_cluster.wire import KVChunk, TransportName, TransportOffer

MAX_EXPORT_NBYTES = 1024  # the largest PoolExport, per part
MAX_EXPORT_PARTS = 1024
# On CUDA, torch's handle consists of a version, a letter and the driver's handle. The letter is "c" for memory from
# cudaMalloc and "e" for an expandable segment. On NPUs, torch's handle is only the driver's, which is opaque.
HANDLE_NBYTES, KIND_AT, PLAIN_KIND = 66, 1, b"c"


class PoolExport(msgspec.Struct, frozen=True, kw_only=True):
    """Tells D how to map the device memory of P's pool.

    P sends it over their Unix socket. A block-major pool is one part; a layer-major pool has a part for each layer, in
    order.
    """

    parts: Annotated[list[MemoryPart], msgspec.Meta(max_length=MAX_EXPORT_PARTS)]
    block_nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


_export_decoder = msgspec.msgpack.Decoder(PoolExport)


def decode_export(data: bytes) -> PoolExport:
    """Raises msgspec.DecodeError, of which ValidationError is a subclass."""
    return _export_decoder.decode(data)


class ExportServer(unix_server.UnixServer):
    """Sends the handles to map the pool. Raises LinkError if the pool's memory cannot be shared."""

    def __init__(self, pool: KVPool, memory: DeviceMemory) -> None:
        if setting := devices.expands_segments():
            raise LinkError(f"{setting}: no other process can map a pool that may grow; remove expandable_segments")
        try:
            parts = [memory.export(each) for each in pool.memory.parts]
        except RuntimeError as error:
            raise LinkError(f"the pool cannot be exported: {first_line(error)}") from error
        self._message = msgspec.msgpack.encode(PoolExport(parts=parts, block_nbytes=pool.layout.block_nbytes))
        super().__init__(keeps=True)

    def _give(self, peer: socket.socket) -> None:
        peer.sendall(len(self._message).to_bytes(4, "big") + self._message)


class IpcReceiver(OneSidedReceiver):
    """D's end: maps P's pool into this device's address space."""

    name: TransportName = "ipc"

    def __init__(self, place: LinkContext, peer: Peer, checksum: Checksum) -> None:
        super().__init__(place, peer, checksum)
        self._peer: socket.socket | None = None

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        if self._peer is None or unix_server.has_hung_up(self._peer):
            raise LinkError("the prefill instance's process has ended, and its device memory with it", retry=True)
        super().receive(sequence, chunk, into)

    def close(self) -> None:
        super().close()
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def source(self) -> Memory:
        self._check_device()
        layout = self.route.source
        way = type(self._pool.memory)  # P's memory has the same class, because both devices are of one kind
        shapes = way.shapes(layout, self._num_blocks)
        self._peer = unix_server.connect(self._offer.address, "device memory", self._place.connect_s)
        export = self._checked(_read(self._peer, MAX_EXPORT_NBYTES * len(shapes)), shapes)
        dtype = TORCH_DTYPES[layout.dtype]
        try:
            of = zip(export.parts, shapes, strict=True)
            found = [self._place.memory.map(part, dtype, shape, self._pool.device) for part, shape in of]
        except RuntimeError as error:
            raise LinkError(f"the prefill instance's device memory cannot be mapped: {first_line(error)}") from error
        return way(layout, found)

    def _check_device(self) -> None:
        """Checks that this device can read P's device. Raises LinkError."""
        own = self._pool.device
        other = devices.with_uuid(own.kind, self._offer.device_uuid)
        if other is None:
            raise LinkError(
                f"the prefill instance's device {self._offer.device_uuid or 'without a name'} is not visible here"
            )
        if not devices.can_read(own, other):
            raise LinkError(f"{own.torch_name} cannot read the prefill instance's device {self._offer.device_uuid}")

    def _checked(self, export: PoolExport, shapes: Sequence[tuple[int, ...]]) -> PoolExport:
        """Checks an export against P's layout. `shapes`: those of the layout's parts. Raises LinkError."""
        source = self.route.source
        block_nbytes = source.block_nbytes
        if len(export.parts) != len(shapes):
            raise LinkError(f"the prefill instance's pool has {len(export.parts)} parts, not {len(shapes)}")
        for part, shape in zip(export.parts, shapes, strict=True):
            wanted = math.prod(shape) * DTYPE_NBYTES[source.dtype]
            if (part.nbytes, export.block_nbytes) != (wanted, block_nbytes):
                raise LinkError(
                    f"the prefill instance's pool is {part.nbytes} bytes in blocks of {export.block_nbytes}, "
                    f"not {wanted} in blocks of {block_nbytes}"
                )
            if self._pool.device.traits.handles_say_their_kind:
                _check_handle(part.handle)
        return export


def _check_handle(handle: bytes) -> None:
    """Raises LinkError unless the handle refers to plain device memory."""
    kind = handle[KIND_AT : KIND_AT + 1]
    if len(handle) != HANDLE_NBYTES or kind != PLAIN_KIND:
        raise LinkError(
            f"the prefill instance's handle of {len(handle)} bytes, kind {kind!r}, does not refer to plain device "
            f"memory (another version of torch, or expandable segments)"
        )


def _read(peer: socket.socket, most_nbytes: int) -> PoolExport:
    """Reads and decodes P's export. Raises LinkError."""
    try:
        nbytes = int.from_bytes(_read_exactly(peer, 4), "big")
        if nbytes > most_nbytes:
            raise LinkError(f"the prefill instance describes its device memory in {nbytes} bytes, which is too many")
        return decode_export(_read_exactly(peer, nbytes))
    except (OSError, EOFError) as error:
        what = str(error) or "it hung up (another user?)"
        raise LinkError(f"the prefill instance's device memory cannot be reached: {what}", retry=True) from error
    except msgspec.DecodeError as error:
        raise LinkError(f"the prefill instance's description of its device memory is invalid: {error}") from error


def _read_exactly(peer: socket.socket, nbytes: int) -> bytes:
    """Raises OSError, EOFError."""
    data = b""
    while len(data) < nbytes:
        part = peer.recv(nbytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def why_not(name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
    """See transport_table.Transport."""
    return "" if own.is_accelerator else "this instance's pool is in host memory"


def ends(name: TransportName, place: LinkContext) -> IpcEnds:
    return IpcEnds(name, place)


class IpcEnds:
    """Exports the pool only once, for any number of links."""

    def __init__(self, name: TransportName, place: LinkContext) -> None:
        self._name, self._place = name, place
        self._server: ExportServer | None = None

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        pool = self._place.pool
        self._server = self._server or ExportServer(pool, self._place.memory)
        return OneSidedSender(self._name, self._server.name, pool, checksum, devices.uuid(pool.device))

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        return IpcReceiver(self._place, peer, checksum)
