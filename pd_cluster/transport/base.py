"""The seam between handover and memory: how the bytes of blocks get from one process's pool into another's.

One sender and one receiver a link, each used by that link's own thread only, in order. A transport moves bytes; who
may send what when, and whether it still counts on arrival, is decided above (engine/exports.py, engine/imports.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from pd_cluster.kv.layout import KVLayout
from pd_cluster.transport.copies import Copies
from pd_cluster.wire import KVChunk, KVPiece, TransportName, TransportOffer

NO_CHECKSUM = 0


class KVSender(Protocol):
    """P's end of a link. `max_payload_nbytes`: what is more is sent in several payloads."""

    name: TransportName
    max_payload_nbytes: int

    def offer(self) -> TransportOffer:
        """Where the receiver finds this end."""

    def open(self, peer: KVLayout) -> None:
        """Waits until the receiver, whose pool has this layout, is there. Raises LinkError."""

    def prepare(self, piece: KVPiece) -> Prepared:
        """What `send` will move. Called when the piece is in the pool, before its header leaves. Raises LinkError."""

    def send(self, sequence: int, prepared: Prepared) -> None:
        """Moves one payload, after its header has left; may return before it has arrived, and wait for an earlier one.

        Raises LinkError: the link is then beyond use.
        """

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """D's end of a link. What it has received is in its blocks when `copies` have settled."""

    name: TransportName
    precision: str  # see kv.layout.Route
    copies: Copies

    def open(self) -> None:
        """Raises LinkError."""

    def expect(self, sequence: int, chunk: KVChunk) -> None:
        """The payload of frame `sequence` will be received soon, after those expected before: it may come in now."""

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None:
        """Waits until the next payload to `receive` is here; that waits by itself else. Raises LinkError."""

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        """Puts a payload into the local blocks `into`; None: take it off the wire and drop it.

        On a device this is launched in `copies`, and may not be over on return. Raises TransferFailed when this
        payload is wrong (the link lives), LinkError when the link is beyond use.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A payload (None: the receiver reads the pool itself), how long it is, and its checksum."""

    payload: torch.Tensor | None
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """XXH3-64 of payloads under a link's own seed; off, everything passes."""

    is_on: bool = True
    seed: int = 0

    def of(self, *parts: torch.Tensor) -> int:
        """Of contiguous bytes, one after the other; 0 when it is off, and never else."""
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
    """The bytes of a contiguous uint8 tensor, without a copy."""
    array: Any = data.numpy()
    return memoryview(array)
