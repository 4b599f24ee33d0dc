"""Transports in which P sends no payloads: D itself reads P's pool, and copies from block to block.

Payloads of pools on a device have no checksum, because the host would have to fetch them to compute it. They are copied
only once, from device memory to device memory. The probe proves that D reads the right memory, and `Confirm` that P did
not change it in the meantime.
"""

from __future__ import annotations

import abc

import msgspec

from pd_cluster.errors import TransferFailed
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS, KVPool, is_block
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_memory import Memory, Seen
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.transport_interface import Checksum, LinkContext, Peer, Prepared, buffer_of, decode_offer
from pd_cluster.wire import KVChunk, KVPiece, TransportName, TransportOffer

MAX_PAYLOAD_NBYTES = 16 << 20
MAX_DEVICE_PAYLOAD_NBYTES = 256 << 20  # so that a launch and its header cost little compared to the copy


class PoolAddress(msgspec.Struct, frozen=True):
    """Identifies P's pool for D: by a random name, and by its accelerator ("" for host memory)."""

    address: str
    device_uuid: str = ""

    def offer(self, transport: TransportName) -> TransportOffer:
        return TransportOffer(transport=transport, data=msgspec.msgpack.encode(self))


class OneSidedSender:
    """P's end. It sends no payloads, because D reads them. `device_uuid`: the accelerator of the pool."""

    meeting = None

    def __init__(
        self, name: TransportName, address: str, pool: KVPool, checksum: Checksum, device_uuid: str = ""
    ) -> None:
        self.name = name
        on_device = pool.device.is_accelerator
        self.max_payload_nbytes = MAX_DEVICE_PAYLOAD_NBYTES if on_device else MAX_PAYLOAD_NBYTES
        self._address = PoolAddress(address, device_uuid)
        self._pool = pool
        self._checksum = Checksum(is_on=False) if on_device else checksum
        self._route: PoolRoute | None = None

    def offer(self) -> TransportOffer:
        return self._address.offer(self.name)

    def open(self, peer: KVLayout) -> None:
        self._route = PoolRoute(self._pool.layout, peer, one_sided=True)

    def prepare(self, piece: KVPiece) -> Prepared:
        route = self._route
        assert route is not None
        return Prepared(None, route.payload_nbytes(piece), self._digest(piece, route))

    def send(self, sequence: int, prepared: Prepared) -> None: ...

    def close(self) -> None: ...

    def _digest(self, piece: KVPiece, route: PoolRoute) -> int:
        if not self._checksum.is_on:
            return 0
        if not route.is_verbatim:
            return self._checksum.of(pack(self._pool.memory, piece, route))
        return self._checksum.of(*self._pool.memory.contiguous_parts(piece))


class OneSidedReader:
    """Copies from P's pool, once D can read it: `source` [num_blocks + NUM_EXTRA_BLOCKS, …]."""

    def __init__(self, source: Memory, route: PoolRoute, pool: KVPool, checksum: Checksum, copies: Copies) -> None:
        self.source, self._route = source, route
        self._pool = pool
        self._checksum = checksum
        self._copies = copies

    def receive(self, chunk: KVChunk, into: list[int]) -> None:
        """Copies a chunk into blocks. Raises TransferFailed."""
        piece, route = chunk.piece, self._route
        if not all(is_block(block, len(self.source)) for block in piece.block_ids):
            raise TransferFailed("a header names a block outside the prefill instance's pool")
        if chunk.nbytes != route.payload_nbytes(piece):
            raise TransferFailed(f"a header announces {chunk.nbytes} bytes for {route.payload_nbytes(piece)}")
        if self._pool.device.is_accelerator:
            with self._copies.launch():
                self._move(piece, into)
            return
        digest = self._checksum.running() if chunk.checksum and self._checksum.is_on else None
        seen = None if digest is None else lambda part: digest.update(buffer_of(part))
        self._move(piece, into, seen)
        if digest is not None and (digest.intdigest() or 1) != chunk.checksum:
            raise TransferFailed("checksum of a KV chunk is wrong")

    def _move(self, piece: KVPiece, into: list[int], seen: Seen | None = None) -> None:
        """Copies a piece. `Confirm` proves that the source did not change in the meantime; the checksum does not."""
        target = self._pool.memory
        if self._route.is_verbatim:
            target.copy_from(self.source, piece, into, seen)
            return
        payload = pack(self.source, piece, self._route)
        if seen is not None:
            seen(payload)
        unpack(payload, piece, self._route, target, into)


class OneSidedReceiver(abc.ABC):
    """D's end. It can read P's pool once it is open."""

    name: TransportName
    meeting = None

    def __init__(self, place: LinkContext, peer: Peer, checksum: Checksum) -> None:
        """Raises LinkError for an invalid offer."""
        self._offer = decode_offer(peer.offer, PoolAddress)
        self._place, self._pool = place, place.pool
        self._num_blocks = peer.num_blocks + NUM_EXTRA_BLOCKS
        self._checksum = checksum
        self.copies = Copies(place.pool.device, place.transfer_s)
        self.route = PoolRoute(peer.layout, place.pool.layout, one_sided=True)
        self._reader: OneSidedReader | None = None

    def open(self) -> None:
        with self.copies.launch():
            self._pool.memory.warm()
        self._reader = OneSidedReader(self.source(), self.route, self._pool, self._checksum, self.copies)

    @abc.abstractmethod
    def source(self) -> Memory:
        """Returns P's pool, [num_blocks + NUM_EXTRA_BLOCKS, …]. Raises LinkError."""

    def expect(self, sequence: int, chunk: KVChunk) -> None: ...  # noqa: B027  (`receive` reads it)

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None: ...  # noqa: B027

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        if into is not None:
            assert self._reader is not None
            self._reader.receive(chunk, into)

    def close(self) -> None:
        """Releases P's pool once no copy reads it any more."""
        self.copies.drain()
        with self.copies.as_current():  # torch unmaps the pool after the work of the current stream
            self._reader = None
