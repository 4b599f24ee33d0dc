"""Describes what a prefix cache has stored and dropped, as events in the format of vLLM 0.32 (its kv_events.py).

Each event is a tagged map; a batch is an array. Events identify a block by the last 64 bits of its content's hash, as a
number. Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pd_cluster.types import RequestSpec, Tier

DEVICE = "GPU"
MEDIA: Mapping[Tier, str] = {"device": DEVICE, "host": "CPU", "disk": "STORAGE"}


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Successive blocks of one prompt, with their `token_ids`. Blocks of a lower tier have no tokens and size 0.

    `parent_block_hash`: the hash of the block before the first; None at a prompt's beginning.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # by block


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All media count as empty now. Later events list the contents that a tier still has."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = 0


class StoredContent(NamedTuple):
    """A block's content and the data of its event. `first`: the position of its first token in the prompt."""

    content: bytes
    parent: bytes | None
    token_ids: Sequence[int]
    first: int
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


def number_of(content: bytes) -> int:
    """Returns the number that identifies a content in events."""
    return int.from_bytes(content[-8:], "big")


class KVEventLog:
    """Collects events in order until `take`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []
        self._lower: dict[bytes, str] = {}  # contents that only a lower tier has -> its medium

    def __bool__(self) -> bool:
        return bool(self._events)

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def stored(
        self, content: bytes, parent: bytes | None, token_ids: Sequence[int], order: RequestSpec, first: int
    ) -> None:
        """Adds a block. `first`: the position of its first token in the prompt. `parent`: the content before it."""
        extra = self._extra_keys(order, first)
        self._store(StoredContent(content, parent, token_ids, first, order.variant or None, extra))

    def _store(self, stored: StoredContent) -> None:
        """Adds a block to the last event if it follows that event's blocks; otherwise adds an event."""
        number, before = number_of(stored.content), None if stored.parent is None else number_of(stored.parent)
        token_ids, name, extra = stored.token_ids, stored.lora_name, stored.extra_keys
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and (last.medium, last.lora_name) == (DEVICE, name)
            and last.block_hashes[-1] == before
        ):
            if extra is not None and last.extra_keys is None:
                last.extra_keys = [None] * len(last.block_hashes)
            last.block_hashes.append(number)
            last.token_ids.extend(token_ids)
            if last.extra_keys is not None:
                last.extra_keys.append(extra)
            return
        keys: list[tuple[Any, ...] | None] | None = None if extra is None else [extra]
        self._events.append(BlockStored([number], before, list(token_ids), self._block_size, None, DEVICE, name, keys))

    def removed(self, content: bytes) -> None:
        self._remove(content, DEVICE)

    def cleared(self) -> None:
        self._lower.clear()
        self._events.append(AllBlocksCleared())

    def moved(self, places: Mapping[bytes, Tier | None]) -> None:
        """Adds events for contents that entered or left tiers below the device. `places`: their tiers, or None."""
        for content, place in places.items():
            medium = MEDIA[place] if place is not None and place != "device" else None
            if (before := self._lower.get(content)) == medium:
                continue
            if before is not None:
                del self._lower[content]
                self._remove(content, before)
            if medium is not None:
                self._lower[content] = medium
                self._events.append(BlockStored([number_of(content)], None, [], 0, None, medium, None))

    def _remove(self, content: bytes, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(number_of(content))
        else:
            self._events.append(BlockRemoved([number_of(content)], medium))

    def _extra_keys(self, order: RequestSpec, first: int) -> tuple[Any, ...] | None:
        """Returns the data besides tokens that a block's hash covers: adapter, images with their positions, salt."""
        if not (order.variant or order.spans or order.cache_salt):
            return None
        here = [each for each in order.spans if each.start < first + self._block_size and each.stop > first]
        pictures = ((span.digest.hex(), span.start - first) for span in here)
        salt = (order.cache_salt,) if order.cache_salt and not first else ()
        found = (*((order.variant,) if order.variant else ()), *pictures, *salt)
        return found or None
