"""What the scheduler knows of instances' prefix caches, and how much of a prompt an instance has by that.

Keys are the beginnings of blocks' hashes (kv/prefix.py). A wrong guess costs time and never a token: the instance looks
for itself. Knows nothing of who is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster import wire
from pd_cluster.kv.prefix import PrefixScope, chain_hashes, keys_of, read_keys
from pd_cluster.reports import InstanceInfo

MAX_KEYS = 1 << 20  # of an instance; about 100 bytes each


class KnownBlocks:
    """The keys of the blocks that one life of an instance can share."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def hear(self, news: wire.CacheKeys) -> None:
        """What exceeds MAX_KEYS is not kept."""
        added, removed = read_keys(news.added), read_keys(news.removed)
        if news.is_whole:
            self._keys = set()
        self._keys.difference_update(removed)
        self._keys.update(added[: max(0, MAX_KEYS - len(self._keys))])

    def num_leading(self, keys: Sequence[int]) -> int:
        """How many of the first keys are known without a gap."""
        for at, key in enumerate(keys):
            if key not in self._keys:
                return at
        return len(keys)


class Prompt:
    """A prompt that is looked up in instances' caches; its keys are made once for each kind of pool."""

    def __init__(self, token_ids: list[int], cache_salt: str, max_tokens: int = 0) -> None:
        """`max_tokens`: of its answer."""
        self.num_tokens = len(token_ids)
        self._most_tokens = len(token_ids) + max_tokens
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._keys: dict[tuple[str, str, int], Sequence[int]] = {}

    def num_cached(self, info: InstanceInfo | None, known: KnownBlocks) -> int:
        """Tokens of it whose KV an instance has, as far as is known; never the last one, which gives the logits."""
        if info is None or info.layout is None or not len(known):
            return 0
        layout = info.layout
        pool = (info.model_identity, info.numerics.digest, layout.block_size)
        if (keys := self._keys.get(pool)) is None:
            root = PrefixScope(info.model_identity, info.numerics).root(self._cache_salt, most_tokens=self._most_tokens)
            num_tokens = (self.num_tokens - 1) // layout.block_size * layout.block_size
            keys = read_keys(keys_of(chain_hashes(root, self._token_ids[:num_tokens], layout.block_size)))
            self._keys[pool] = keys
        return known.num_leading(keys) * layout.block_size
