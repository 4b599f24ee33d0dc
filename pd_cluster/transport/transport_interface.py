"""The interface between handover and memory: moves the bytes of blocks from one process's pool into another's.

One sender and one receiver per link, each used only by that link's own thread, in order. A transport moves bytes; the
layer above decides who may send what and when, and whether it still counts on arrival (engine/handover, exports.py and
imports.py).
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
    """P's end of a link. More than `max_payload_nbytes` is sent in several payloads."""

    name: TransportName
    max_payload_nbytes: int

    @property
    def meeting(self) -> Meeting | None:
        """Returns the meeting that receives the other end's keys, if it sends any."""

    def offer(self) -> TransportOffer:
        """Returns what the receiver needs to find this end."""

    def open(self, peer: KVLayout) -> None:
        """Waits until the receiver, whose pool has this layout, is there. Raises LinkError."""

    def prepare(self, piece: KVPiece) -> Prepared:
        """Prepares a payload, once the piece is in the pool and before its header leaves. Raises LinkError."""

    def send(self, sequence: int, prepared: Prepared) -> None:
        """Moves one payload, after its header has left; may return before it has arrived, and wait for an earlier one.

        Raises LinkError: the link is then unusable.
        """

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """D's end of a link. Received payloads are in their blocks once `copies` have settled."""

    name: TransportName
    route: PoolRoute
    copies: Copies

    @property
    def meeting(self) -> Meeting | None:
        """Returns the meeting that receives the other end's keys, if it sends any."""

    def open(self) -> None:
        """Raises LinkError."""

    def expect(self, sequence: int, chunk: KVChunk) -> None:
        """Announces the payload of frame `sequence`, after those expected before: it may be received from now on."""

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None:
        """Waits until the next payload for `receive` is here, which otherwise waits itself. Raises LinkError."""

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        """Puts a payload into the local blocks `into`; None: take it off the wire and drop it.

        On a device this is launched in `copies`, and may not be finished on return. Raises TransferFailed when this
        payload is wrong (the link lives), LinkError when the link is unusable.
        """

    def close(self) -> None: ...


PostKey = Callable[[str, bytes], None]  # sends one key of a meeting to the link's other end, from any thread


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
    """The connection of a lane's end and its ways out: `post` sends over it, `report` reaches the engine."""

    conn: str
    post: Callable[[Body], None]
    report: Report
    note: Note = note_nothing


class Ends(Protocol):
    """Creates both ends of one transport at one place."""

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        """Raises LinkError when this place cannot offer it, OSError or RuntimeError for a temporary failure."""

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        """Raises LinkError."""


class Implementation(Protocol):
    """The module of a transport; a module may have several, by name."""

    def why_not(self, name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
        """See table.Transport. Raises LinkError for an offer that makes no sense."""

    def ends(self, name: TransportName, place: LinkContext) -> Ends: ...


_Own = TypeVar("_Own", bound=msgspec.Struct)


def decode_offer(offer: TransportOffer, own: type[_Own]) -> _Own:
    """Decodes the offer of P's end of a transport to D's. Raises LinkError."""
    try:
        return msgspec.msgpack.decode(offer.data, type=own)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"the prefill instance's offer of {offer.transport} makes no sense: {error}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """A payload (None: the receiver reads the pool itself), its length, and its checksum."""

    payload: torch.Tensor | None
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """XXH3-64 of payloads under a link's own seed; off, everything passes."""

    is_on: bool = True
    seed: int = 0

    def of(self, *parts: torch.Tensor) -> int:
        """Returns the checksum of contiguous bytes, one after the other; 0 only when it is off."""
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
