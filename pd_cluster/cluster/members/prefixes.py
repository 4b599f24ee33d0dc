"""Instances' prefix caches as the scheduler knows them, and how much of a prompt each has.

Keys are prefixes of blocks' hashes (kv/prefix.py). A wrong guess costs time and never a token: the instance checks
its own cache. Knows nothing of how an instance is chosen.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from pd_cluster import wire
from pd_cluster.kv.prefix import PrefixScope, chain_hashes, keys_of, read_keys
from pd_cluster.reports import InstanceInfo
from pd_cluster.types import TIERS, Order, Tier

MAX_KEYS = 1 << 20  # per instance; about 100 bytes each
UNMEASURED: dict[Tier, float] = {"device": 0.0, "host": 1 / 16, "disk": 1 / 4}  # of the time to compute a token
NO_LOAD = wire.Load()


class KnownBlocks:
    """The keys of the blocks that one life of an instance can share, and the tier that has each."""

    def __init__(self) -> None:
        self._keys: dict[int, Tier] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def hear(self, news: wire.CacheKeys) -> None:
        """Adds and removes keys; keys beyond MAX_KEYS are dropped."""
        added, removed = read_keys(news.added), read_keys(news.removed)
        if news.is_whole:
            self._keys = {}
        for key in removed:
            self._keys.pop(key, None)
        if len(self._keys) + len(added) > MAX_KEYS:
            room = itertools.chain(itertools.repeat(True, max(0, MAX_KEYS - len(self._keys))), itertools.repeat(False))
            added = array("Q", [key for key in added if key in self._keys or next(room)])
        self._keys.update(dict.fromkeys(added, news.tier))

    def leading(self, keys: Sequence[int]) -> dict[Tier, int]:
        """Counts by tier the first keys that are known without a gap."""
        counts: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for key in keys:
            if (tier := self._keys.get(key)) is None:
                break
            counts[tier] += 1
        return counts


class Prompt:
    """A prompt to look up in instances' caches; its keys are computed once per kind of pool."""

    def __init__(self, order: Order) -> None:
        self.num_tokens = len(order.prompt_token_ids)
        self._order = order
        self._keys: dict[tuple[str, str, str, int], Sequence[int]] = {}

    def num_cached(self, info: InstanceInfo | None, known: KnownBlocks, load: wire.Load = NO_LOAD) -> int:
        """Returns the prompt tokens whose computation an instance is known to save; never the last one, which gives the
        logits. A token that must be loaded from a slower tier counts less, by its time to load beside that to compute.
        """
        if info is None or info.layout is None or not len(known):
            return 0
        layout = info.layout
        pool = (info.model_identity, info.numerics.digest, layout.draft_head, layout.block_size)
        if (keys := self._keys.get(pool)) is None:
            order = self._order
            root = PrefixScope(info.model_identity, info.numerics, layout.draft_head).root(order)
            token_ids = order.prompt_token_ids[: self.num_tokens - 1]
            hashes = chain_hashes(root, token_ids, layout.block_size, 0, order.spans, order.rope_positions)
            keys = self._keys[pool] = read_keys(keys_of(hashes))
        counts = known.leading(keys)
        saved = sum(count * (1 - _cost(tier, load)) for tier, count in counts.items() if count)
        return int(saved * layout.block_size)


def _cost(tier: Tier, load: wire.Load) -> float:
    """Returns the time to load a token from a tier as a part of that to compute it, at most 1."""
    token_s = load.tier_token_s.get(tier, 0.0)
    if tier == "device" or not (token_s and load.prefill_tokens_per_s):
        return UNMEASURED[tier]
    return min(1.0, token_s * load.prefill_tokens_per_s)
