"""Caches images and videos, so that the same data: URL is not decoded again.

Only data: URLs are cached, because the content of another URL may change. An item with its sender's own name (`uuid`)
is also cached under that name. Tenants never share items.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Protocol

from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.media.video_rules import Video
from pd_cluster.types import Image

SHORT_NUM_CHARS = 1 << 16  # longer URLs are hashed on another thread, so that no stream waits for them

Item = tuple[Image, bytes] | Video


class _Source(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def max_frames(self) -> int | None: ...
    @property
    def options(self) -> ReadOptions: ...


def num_bytes_of(item: Item) -> int:
    """Returns the size of its pixels."""
    return item.num_bytes if isinstance(item, Video) else len(item[0].pixels)


def _digest(what: str, source: _Source, salt: str, text: str) -> bytes:
    parts = (what, salt, source.kind, repr(source.max_frames), repr(source.options), text)
    data = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(data.encode("utf-8", "surrogatepass")).digest()


class MediaCache:
    """Keeps up to `most_nbytes` of pixels; evicts the least recently used first."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._nbytes = 0
        self._kept: OrderedDict[bytes, Item] = OrderedDict()

    async def key(self, source: _Source, salt: str) -> bytes | None:
        """Returns the key of an item by its URL; None: the item is not cached."""
        if not self._most_nbytes or not source.url.startswith("data:"):
            return None

        def work() -> bytes:
            return _digest("url", source, salt, source.url)

        return await asyncio.to_thread(work) if len(source.url) > SHORT_NUM_CHARS else work()

    def name_of(self, source: _Source, salt: str) -> bytes | None:
        """Returns the key of an item by its sender's name; None: it has no name, or the cache is off."""
        return _digest("uuid", source, salt, source.uuid) if source.uuid and self._most_nbytes else None

    def replace(self, key: bytes, item: Item) -> None:
        """Stores an item, in place of an earlier item of this key."""
        if (former := self._kept.pop(key, None)) is not None:
            self._nbytes -= num_bytes_of(former)
        self.put(key, item)

    def get(self, key: bytes) -> Item | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: bytes, item: Item) -> None:
        if key in self._kept or num_bytes_of(item) > self._most_nbytes:
            return
        self._kept[key] = item
        self._nbytes += num_bytes_of(item)
        while self._nbytes > self._most_nbytes:
            _, dropped = self._kept.popitem(last=False)
            self._nbytes -= num_bytes_of(dropped)
