"""Reports to schedulers, for routing, which blocks' contents this worker can share and which tier has them.

Knows nothing of prompts or requests. A key is the beginning of a block's hash (kv/prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pd_cluster import wire
from pd_cluster.engine.handover.links.link_ends import Post
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import keys_of
from pd_cluster.kv.reached_blocks import ReachedBlocks
from pd_cluster.types import TIERS, Tier

MAX_KEYS = 1 << 16  # the most keys in one message


class CacheReports(Stage):
    def __init__(self, post: Post, blocks: BlockPool | ReachedBlocks) -> None:
        self._post = post
        self._blocks = blocks
        self._clients: set[str] = set()

    def opened(self, conn: str, is_scheduler: bool) -> None:
        """Sends all keys to a new scheduler."""
        if not is_scheduler:
            return
        self._clients.add(conn)
        self._post.send(conn, wire.CacheKeys(is_whole=True))
        for news in _added(self._blocks.follow()):
            self._post.send(conn, news)

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        self._clients.discard(conn)

    def blocks_changed(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Sends changed contents to every connected scheduler."""
        if not changes or not self._clients:
            return
        gone = [content for content, tier in changes.items() if tier is None]
        news = [wire.CacheKeys(removed=keys_of(gone))] if gone else []
        news += _added(changes)
        for client in self._clients:
            for each in news:
                self._post.send(client, each)


def _added(places: Mapping[bytes, Tier | None]) -> Iterator[wire.CacheKeys]:
    """Yields the messages that report available contents, at least one content each."""
    by_tier: dict[Tier | None, list[bytes]] = {tier: [] for tier in (*TIERS, None)}
    for content, place in places.items():
        by_tier[place].append(content)
    for tier in TIERS:
        contents = by_tier[tier]
        for start in range(0, len(contents), MAX_KEYS):
            yield wire.CacheKeys(added=keys_of(contents[start : start + MAX_KEYS]), tier=tier)
