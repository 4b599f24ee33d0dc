"""The interface of transports, which move the bytes of blocks from one process's pool into another's.

A lane has one sender and one receiver. Only the lane's own thread at each end uses them, and in order. The layer above
(exports.py and imports.py in engine/handover) decides what may be sent when, and whether an arrival still counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import xxhash

from pd_cluster.devices.device import Device
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.device_memory import DeviceMemory
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.link_events import Report
from pd_cluster.transport.meeting import Meeting
from pd_cluster.types import Note, note_nothing
from pd_cluster.wire import Body, KVChunk, KVPiece, TransportName, TransportOffer

NO_CHECKSUM = 0


class KVSender(Protocol):
    """P's end of a lane. A piece of more than `max_payload_nbytes` is sent in several payloads."""

    name: TransportName
    max_payload_nbytes: int

    @property
    def meeting(self) -> Meeting | None:
        """Returns the meeting that receives the other end's keys; None if the transport has no keys."""

    def offer(self) -> TransportOffer:
        """Returns the data with which the receiver finds this end."""

    def open(self, peer: KVLayout) -> None:
        """Waits until the receiver, whose pool has this layout, is connected. Raises LinkError."""

    def prepare(self, piece: KVPiece) -> Prepared:
        """Prepares a payload, once its piece is in the pool and before its header is sent. Raises LinkError."""

    def send(self, sequence: int, prepared: Prepared) -> None:
        """Sends one payload, whose header was sent before.

        May wait until an earlier payload has arrived; does not wait for this one. Raises LinkError if the link is
        unusable.
        """

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """D's end of a lane. Received payloads are in their blocks once `copies` have settled."""

    name: TransportName
    route: PoolRoute
    copies: Copies

    @property
    def meeting(self) -> Meeting | None:
        """Returns the meeting that receives the other end's keys; None if the transport has no keys."""

    def open(self) -> None:
        """Raises LinkError."""

    def expect(self, sequence: int, chunk: KVChunk) -> None:
        """Announces the payload of frame `sequence`, which may be received from now on.

        Payloads are announced in order.
        """

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None:
        """Waits until the payload of the next `receive` has arrived. Without this call, `receive` waits.

        Raises LinkError.
        """

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        """Copies a payload into the local blocks `into`; None: receives the payload and drops it.

        On a device, the copy is launched in `copies` and may still run afterwards. Raises TransferFailed if this
        payload is wrong and the link remains usable, LinkError if the link is unusable.
        """

    def close(self) -> None: ...


PostKey = Callable[[str, bytes], None]  # sends one of a meeting's keys to the other end; any thread may call it


@dataclass(frozen=True, slots=True)
class LinkContext:
    """A worker's pool of one group of layers, and the configuration of its lanes."""

    pool: KVPool
    memory: DeviceMemory
    wants_int8: bool
    bind_host: str
    connect_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Peer:
    """P's end of a lane, as D receives it when the link opens."""

    offer: TransportOffer
    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LaneContext:
    """The connection of a lane's end. `post` sends a message over it; `report` passes an event to the engine."""

    conn: str
    post: Callable[[Body], None]
    report: Report
    note: Note = note_nothing


class Ends(Protocol):
    """Creates both ends of one transport for one LinkContext."""

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        """Raises LinkError if this process cannot offer the transport, OSError or RuntimeError for a brief failure."""

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        """Raises LinkError."""


class Implementation(Protocol):
    """The interface of a transport's module. A module may implement several transports, which differ in name."""

    def why_not(self, name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
        """See transport_table.Transport. Raises LinkError for an invalid offer."""

    def ends(self, name: TransportName, place: LinkContext) -> Ends: ...


_Own = TypeVar("_Own", bound=msgspec.Struct)


def decode_offer(offer: TransportOffer, own: type[_Own]) -> _Own:
    """Decodes what P's end of a transport offers. Raises LinkError."""
    try:
        return msgspec.msgpack.decode(offer.data, type=own)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"the prefill instance's offer of {offer.transport} is invalid: {error}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """A payload (None: the receiver reads the pool itself), its length, and its checksum."""

    payload: torch.Tensor | None
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """XXH3-64 of payloads, with a link's own seed. If it is off, every payload passes."""

    is_on: bool = True
    seed: int = 0

    def of(self, *parts: torch.Tensor) -> int:
        """Returns the checksum of contiguous parts, in order. It is 0 only if checksums are off."""
        if not self.is_on:
            return NO_CHECKSUM
        if len(parts) == 1:
            return xxhash.xxh3_64_intdigest(buffer_of(parts[0]), self.seed) or 1
        digest = self.running()
        for part in parts:
            digest.update(buffer_of(part))
        return digest.intdigest() or 1

    def running(self) -> Any:
        return xxhash.xxh3_64(seed=self.seed)


def buffer_of(data: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous uint8 tensor, without a copy."""
    array: Any = data.numpy()
    return memoryview(array)
