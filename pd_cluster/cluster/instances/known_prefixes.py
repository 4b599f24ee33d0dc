"""Records what the scheduler knows of instances' prefix caches, and counts how much of a prompt each one holds.

Keys are prefixes of blocks' hashes (kv/prefix_index.py). A wrong count costs time but changes no token: the instance
checks its own cache. Knows nothing of how an instance is chosen.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.kv.prefix_index import PrefixScope, keys_of, prompt_hashes, read_keys
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.types import TIERS, RequestSpec, Tier

MAX_KEYS = 1 << 20  # per instance; about 100 bytes each
# a token's assumed load time, as a share of its compute time, until both are measured
UNMEASURED: dict[Tier, float] = {"device": 0.0, "host": 1 / 16, "disk": 1 / 4}
NO_LOAD = wire.Load()
NO_BLOCK = -1
SLICE_NUM_BLOCKS = 256  # blocks whose keys are computed without a pause


@dataclass(frozen=True, slots=True, eq=False)
class PoolKind:
    """The properties of a pool that blocks' hashes depend on in addition to the prompt. Interned: compared by
    identity.
    """

    model_identity: str
    numerics: Numerics
    draft_head: str
    block_size: int


_pool_kind = functools.lru_cache(maxsize=1024)(PoolKind)  # an eviction only causes keys to be computed again


def pool_kind_of(info: InstanceInfo | None) -> PoolKind | None:
    """Returns the kind of the instance's pool; None if its description is incomplete."""
    if info is None or info.layout is None:
        return None
    return _pool_kind(info.model_identity, info.numerics, info.layout.draft_head, info.layout.block_size)


class KnownBlocks:
    """The keys of the blocks that one life of an instance can share, with the tier that holds each."""

    def __init__(self) -> None:
        self.tiers: dict[int, Tier] = {}  # key -> tier
        self.has_lower = False  # whether a tier below the device's memory has ever held a key
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self.tiers)

    def apply(self, news: wire.CacheKeys) -> None:
        """Adds and removes keys; keys beyond MAX_KEYS are dropped."""
        added, removed = read_keys(news.added), read_keys(news.removed)
        self.num_changes += 1
        if news.is_whole:
            self.tiers = {}
        for key in removed:
            self.tiers.pop(key, None)
        if len(self.tiers) + len(added) > MAX_KEYS:
            is_kept = itertools.chain(
                itertools.repeat(True, max(0, MAX_KEYS - len(self.tiers))), itertools.repeat(False)
            )
            added = array("Q", [key for key in added if key in self.tiers or next(is_kept)])
        self.tiers.update(dict.fromkeys(added, news.tier))
        self.has_lower = self.has_lower or (news.tier != "device" and len(added) > 0)

    def num_leading(self, keys: Sequence[int]) -> int:
        """Counts the leading keys up to the first unknown one."""
        tiers = self.tiers
        for at, key in enumerate(keys):
            if key not in tiers:
                return at
        return len(keys)

    def leading(self, keys: Sequence[int]) -> dict[Tier, int]:
        """Counts the leading keys up to the first unknown one, by tier."""
        counts: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        if not self.has_lower:
            counts["device"] = self.num_leading(keys)
            return counts
        for key in keys:
            if (tier := self.tiers.get(key)) is None:
                break
            counts[tier] += 1
        return counts


class PromptKeys(dict[PoolKind, list[int]]):
    """The keys of a prompt's first blocks, computed once per kind of pool, and only as far as instances may have them.

    When all keys of a prompt are computed, NO_BLOCK, which no instance has, follows them.
    """

    def __init__(self, order: RequestSpec) -> None:
        self._order = order
        self._roots: dict[PoolKind, bytes] = {}

    def __missing__(self, pool: PoolKind) -> list[int]:
        self._roots[pool] = PrefixScope(pool.model_identity, pool.numerics, pool.draft_head).root(self._order)
        self[pool] = keys = list[int]()
        self.extend(pool)
        return keys

    def extend(self, pool: PoolKind) -> None:
        """Computes the keys of the next blocks."""
        keys = self[pool]
        first, most = len(keys), self.num_tokens // pool.block_size
        stop = min(first + SLICE_NUM_BLOCKS, most)
        hashes = prompt_hashes(self._order, self._roots[pool], pool.block_size, stop)[first:stop]
        keys += read_keys(keys_of(hashes))
        if len(hashes) < SLICE_NUM_BLOCKS:
            keys.append(NO_BLOCK)

    @property
    def num_tokens(self) -> int:
        """Counts the tokens that may be cached: the last one is always computed, for its logits."""
        return len(self._order.prompt_token_ids) - 1


class Prompt:
    """A prompt to look up in instances' caches."""

    def __init__(self, order: RequestSpec) -> None:
        self.num_tokens = len(order.prompt_token_ids)
        self.keys = PromptKeys(order)
        # Known blocks of an instance -> `num_changes` when they were counted, and the counts by tier; only for long
        # prompts.
        self._counts: dict[KnownBlocks, tuple[int, dict[Tier, int]]] = {}

    def num_cached(self, pool: PoolKind, known: KnownBlocks, load: wire.Load = NO_LOAD) -> int:
        """Returns how many of the prompt's tokens an instance can take from its caches, as far as known; never the last
        token, which is computed for its logits. A token in a slower tier counts less, by the ratio of its load time to
        its compute time.
        """
        keys = self.keys[pool]
        if not known.has_lower and len(keys) <= SLICE_NUM_BLOCKS:  # the usual case, computed quickly
            num_blocks = known.num_leading(keys)
            if num_blocks < len(keys):
                return num_blocks * pool.block_size
        counts = self._num_known(pool, known)
        saved = sum(count * (1 - _cost(tier, load)) for tier, count in counts.items() if count)
        return int(saved * pool.block_size)

    def _num_known(self, pool: PoolKind, known: KnownBlocks) -> dict[Tier, int]:
        """Counts the prompt's known blocks. Keeps long prompts' counts, since each request needs them repeatedly."""
        keys = self.keys[pool]
        if len(keys) > SLICE_NUM_BLOCKS and known in self._counts:
            num_changes, counts = self._counts[known]
            if num_changes == known.num_changes:
                return counts
        counts = known.leading(keys)
        while (num_blocks := sum(counts.values())) == len(keys):
            self.keys.extend(pool)
            for tier, count in known.leading(keys[num_blocks:]).items():
                counts[tier] += count
        if len(keys) > SLICE_NUM_BLOCKS:
            self._counts[known] = known.num_changes, counts
        return counts

    async def look_up(self, pool: PoolKind, known: KnownBlocks) -> None:
        """Counts what `num_cached` reads, a slice of keys at a time, so that other tasks run in between."""
        num_changes, keys, num_blocks = known.num_changes, self.keys[pool], 0
        counts: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        while sum(counts.values()) == num_blocks:
            if num_blocks == len(keys):
                self.keys.extend(pool)
            part = keys[num_blocks : num_blocks + SLICE_NUM_BLOCKS]
            for tier, count in known.leading(part).items():
                counts[tier] += count
            num_blocks += len(part)
            await asyncio.sleep(0)
        self._counts[known] = num_changes, counts  # counted again if blocks have changed meanwhile

    def num_held(self, pool: PoolKind, known: KnownBlocks) -> int:
        """Returns how many of the prompt's first tokens are in device or host memory."""
        counts = self._num_known(pool, known)
        if not counts["disk"]:
            return sum(counts.values()) * pool.block_size
        keys, num_blocks = self.keys[pool], 0
        while known.tiers.get(keys[num_blocks], "disk") != "disk":
            num_blocks += 1
            if num_blocks == len(keys):
                self.keys.extend(pool)
        return num_blocks * pool.block_size


def _cost(tier: Tier, load: wire.Load) -> float:
    """Returns the time to load a token from a tier as a share of the time to compute it, at most 1."""
    token_s = load.tier_token_s.get(tier, 0.0)
    if tier == "device" or not (token_s and load.prefill_tokens_per_s):
        return UNMEASURED[tier]
    return min(1.0, token_s * load.prefill_tokens_per_s)
