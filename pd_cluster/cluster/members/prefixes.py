"""Instances' prefix caches as the scheduler knows them, and how much of a prompt each has.

Keys are prefixes of blocks' hashes (kv/prefix.py). A wrong guess costs time and never a token: the instance checks
its own cache. Knows nothing of how an instance is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster import wire
from pd_cluster.kv.prefix import PrefixScope, chain_hashes, keys_of, read_keys
from pd_cluster.reports import InstanceInfo
from pd_cluster.types import Order

MAX_KEYS = 1 << 20  # per instance; about 100 bytes each


class KnownBlocks:
    """The keys of the blocks that one life of an instance can share."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def hear(self, news: wire.CacheKeys) -> None:
        """Adds and removes keys; keys beyond MAX_KEYS are dropped."""
        added, removed = read_keys(news.added), read_keys(news.removed)
        if news.is_whole:
            self._keys = set()
        self._keys.difference_update(removed)
        self._keys.update(added[: max(0, MAX_KEYS - len(self._keys))])

    def num_leading(self, keys: Sequence[int]) -> int:
        """Returns how many of the first keys are known without a gap."""
        for at, key in enumerate(keys):
            if key not in self._keys:
                return at
        return len(keys)


class Prompt:
    """A prompt to look up in instances' caches; its keys are computed once per kind of pool."""

    def __init__(self, order: Order) -> None:
        self.num_tokens = len(order.prompt_token_ids)
        self._order = order
        self._keys: dict[tuple[str, str, int], Sequence[int]] = {}

    def num_cached(self, info: InstanceInfo | None, known: KnownBlocks) -> int:
        """Returns the prompt tokens with KV known to be in an instance; never the last one, which gives the logits."""
        if info is None or info.layout is None or not len(known):
            return 0
        layout = info.layout
        pool = (info.model_identity, info.numerics.digest, layout.block_size)
        if (keys := self._keys.get(pool)) is None:
            order = self._order
            root = PrefixScope(info.model_identity, info.numerics).root(order)
            token_ids = order.prompt_token_ids[: self.num_tokens - 1]
            hashes = chain_hashes(root, token_ids, layout.block_size, 0, order.spans, order.rope_positions)
            keys = self._keys[pool] = read_keys(keys_of(hashes))
        return known.num_leading(keys) * layout.block_size
