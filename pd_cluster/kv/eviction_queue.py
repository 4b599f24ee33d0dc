"""Orders a tier's contents for eviction: the least recently used first, and retained ones after others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pd_cluster.kv.retained_blocks import RetainedBlocks
from pd_cluster.types import Retention


class EvictionQueue:
    """Has every content of a tier. At most `most_retained` contents are retained, in equal shares for their owners."""

    def __init__(self, most_retained: int) -> None:
        self._others: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._retained = RetainedBlocks[bytes](most_retained)

    def __len__(self) -> int:
        return len(self._others) + len(self._retained)

    def __contains__(self, content: bytes) -> bool:
        return content in self._others or content in self._retained

    def __iter__(self) -> Iterator[bytes]:
        """Yields contents in the order in which they should be dropped."""
        yield from self._others
        yield from self._retained.in_order()

    def used(self, content: bytes, retention: Retention | None = None) -> None:
        """Adds a content, or makes it the most recently used one. Retains it if `retention` is given."""
        if retention is not None:
            self.discard(content)
            self._others.update((each, None) for each, _ in self._retained.add(content, retention))
        elif content in self._retained:
            self._retained.used(content)
        else:
            self._others[content] = None
            self._others.move_to_end(content)

    def discard(self, content: bytes) -> bool:
        """Removes a content. Returns whether it was in the queue."""
        if content in self._others:
            del self._others[content]
            return True
        return self._retained.remove(content) is not None

    def expire(self, now_s: float) -> None:
        """Ends retentions that have expired.

        Their contents are the next to be dropped, because all others were used later.
        """
        for content in reversed(self._retained.expired(now_s) if len(self._retained) else ()):
            self._others[content] = None
            self._others.move_to_end(content, last=False)

    def clear(self) -> None:
        self._others.clear()
        self._retained.clear()
