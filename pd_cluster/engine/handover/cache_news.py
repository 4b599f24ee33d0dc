"""Reports to schedulers which blocks' contents this worker's prefix cache knows, so that prompts find their prefix.

Knows nothing of prompts or requests; a key is the beginning of a block's hash (kv/prefix.py).
"""

from __future__ import annotations

from pd_cluster import wire
from pd_cluster.engine.handover.links import Post
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import keys_of

MAX_KEYS = 1 << 16  # in one message


class CacheNews:
    def __init__(self, post: Post, blocks: BlockPool) -> None:
        self._post = post
        self._blocks = blocks
        self._clients: set[str] = set()

    def opened(self, client: str) -> None:
        """Sends all keys to a scheduler that knows none yet."""
        self._clients.add(client)
        contents = self._blocks.follow()
        for start in range(0, max(1, len(contents)), MAX_KEYS):
            some = contents[start : start + MAX_KEYS]
            self._post.send(client, wire.CacheKeys(added=keys_of(some), is_whole=start == 0))

    def closed(self, client: str) -> None:
        self._clients.discard(client)

    def tick(self) -> None:
        """Sends the changes since the last call to every connected scheduler."""
        changes = self._blocks.changes()
        if not changes or not self._clients:
            return
        news = wire.CacheKeys(
            added=keys_of(content for content, is_known in changes.items() if is_known),
            removed=keys_of(content for content, is_known in changes.items() if not is_known),
        )
        for client in self._clients:
            self._post.send(client, news)
