"""The seam between handover and memory: how the bytes of blocks get from one process's pool into another's.

One sender and one receiver a link, each used by that link's own thread only, in order. A transport moves bytes; who
may send what when, and whether it still counts on arrival, is decided above (engine/exports.py, engine/imports.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import xxhash

from pd_cluster.wire import KVChunk, TransportName, TransportOffer

MAX_PAYLOAD_NBYTES = 16 << 20  # a chunk of more is sent in several


class KVSender(Protocol):
    """P's end of a link."""

    name: TransportName

    def offer(self) -> TransportOffer:
        """Where the receiver finds this end."""

    def open(self) -> None:
        """Waits until the receiver is there. Raises LinkError."""

    def payload(self, block_ids: list[int], checksum: bool) -> tuple[torch.Tensor | None, int]:
        """What `send` will move, and its checksum (0: none). Called before the chunk's header leaves."""

    def send(self, payload: torch.Tensor | None) -> None:
        """Moves one chunk, after its header has left. Raises LinkError: the link is then beyond use."""

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """D's end of a link."""

    name: TransportName

    def open(self) -> None:
        """Raises LinkError."""

    def receive(self, chunk: KVChunk, into: list[int] | None) -> None:
        """Puts a chunk's payload into the local blocks `into`; None: take it off the wire and drop it.

        Raises TransferFailed when this payload is wrong (the link lives), LinkError when the link is beyond use.
        """

    def close(self) -> None: ...


def checksum_of(blocks: torch.Tensor) -> int:
    """xxh3-64 of contiguous bytes; never 0, which means no checksum."""
    return xxhash.xxh3_64_intdigest(buffer_of(blocks)) or 1


def buffer_of(blocks: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor, without a copy."""
    array: Any = blocks.numpy()
    return memoryview(array)


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """Consecutive ids joined: [3, 4, 5, 9] -> [(3, 3), (9, 1)] as (first, count)."""
    found: list[tuple[int, int]] = []
    for block in ids:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found
