"""Logs as stored only those cached blocks that precede a kept state, because no prompt can use other blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pd_cluster.kv.kv_event_log import DEVICE, KVEventLog, StoredContent
from pd_cluster.types import RequestSpec, Tier


class ReachedEventLog(KVEventLog):
    """Logs the changes of `ReachedBlocks`: a stored block becomes an event when `moved` reports that it is reached."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._stored: dict[bytes, StoredContent] = {}
        self._published: set[bytes] = set()
        self._pending: set[bytes] = set()  # reached contents that were not stored yet when `moved` was called

    def stored(
        self, content: bytes, parent: bytes | None, token_ids: Sequence[int], order: RequestSpec, first: int
    ) -> None:
        extra = self._extra_keys(order, first)
        self._stored[content] = StoredContent(content, parent, token_ids, first, order.variant or None, extra)

    def removed(self, content: bytes) -> None:
        self._stored.pop(content, None)

    def cleared(self) -> None:
        super().cleared()
        self._stored.clear()
        self._pending |= self._published  # `moved` does not report contents that are stored again at once
        self._published.clear()

    def moved(self, places: Mapping[bytes, Tier | None]) -> None:
        """Adds events for the contents that became reached or unreached. None: unreached."""
        places = {**dict.fromkeys(self._pending, "device"), **places}
        for content in [each for each, place in places.items() if place is None and each in self._published]:
            self._published.remove(content)
            self._remove(content, DEVICE)
        reached = {content for content, place in places.items() if place is not None} - self._published
        self._pending = {content for content in reached if content not in self._stored}
        new = [self._stored[content] for content in reached - self._pending]
        for each in sorted(new, key=lambda each: (each.first, each.content)):  # parents first
            self._published.add(each.content)
            self._store(each)
