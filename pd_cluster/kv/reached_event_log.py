"""Describes only those cached blocks as stored that precede a kept state, since no prompt can use the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pd_cluster.kv.kv_event_log import DEVICE, KVEventLog, StoredContent
from pd_cluster.types import RequestSpec, Tier


class ReachedEventLog(KVEventLog):
    """Describes the changes of `ReachedBlocks`: a block that is stored becomes an event when `moved` names it."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._stored: dict[bytes, StoredContent] = {}
        self._published: set[bytes] = set()
        self._cleared: set[bytes] = set()  # published before `cleared`, and perhaps reached again since then

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
        self._cleared |= self._published
        self._published.clear()

    def moved(self, places: Mapping[bytes, Tier | None]) -> None:
        """Adds events for the contents that became reached or unreached. None: unreached."""
        places = {**dict.fromkeys(self._cleared, "device"), **places}
        self._cleared.clear()
        for content, place in places.items():
            if place is None and content in self._published:
                self._published.remove(content)
                self._remove(content, DEVICE)
        new = [self._stored[content] for content, place in places.items() if place and content not in self._published]
        for each in sorted(new, key=lambda each: each.first):  # parents first
            self._published.add(each.content)
            self._store(each)
