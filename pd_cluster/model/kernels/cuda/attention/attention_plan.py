"""Divides a step's attention into programs, on the host, from lengths only. Independent of tensors and kernels.

The kernels derive each row's splits from context_lens. So a plan of `plan_decode` is valid for every batch of its size:
a CUDA graph captured with it can be replayed with other contexts and tables in the same buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs

# The splits of a context are fixed by position, so that a row's bits do not depend on the batch. In an 8B model a split
# is 128 KiB of keys and values of one KV head. With its share of an H100's bandwidth, a program reads a split in about
# 11 us, and its first key arrives after 1 to 2 us; the result that it stores is 1/64 of what it reads. With 512 keys
# per split, a context of 1,024 tokens would occupy only 16 programs.
SPLIT_KEYS = 256
MAX_SPLITS = 64  # per context; limits the workspace: contexts over 16,128 keys have wider splits
PROGRAMS_PER_SM = 2  # programs that run concurrently, enough to keep many bytes in flight

Ids = npt.NDArray[np.int32]
NO_SEQS: Ids = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Sequences with one query are decoded: `num_workers` programs per KV head take their splits. Others form tiles.

    No context has more than `max_splits` splits; a split has `split_keys` keys or a multiple.
    `tiles` and `decode_seqs` are copied to the device with the batch (`BatchMetadata`).
    """

    configs: AttentionConfigs
    num_seqs: int
    max_splits: int
    split_keys: int
    num_workers: int
    decode_seqs: Ids  # [num_decode] ascending
    tiles: Ids  # [num_tiles, 2]: sequence, first query of the tile; most keys first

    @property
    def all_decode(self) -> bool:
        return len(self.decode_seqs) == self.num_seqs

    def workspace_numel(self, num_heads: int, head_dim: int) -> int:
        """Returns the number of float32 elements for the results of splits: an output and a log-sum-exp each."""
        return 0 if self.max_splits == 1 else len(self.decode_seqs) * num_heads * self.max_splits * (head_dim + 1)

    def num_arrivals(self, num_kv_heads: int) -> int:
        """Returns how many counters of completed splits a launch needs."""
        return 0 if self.max_splits == 1 else len(self.decode_seqs) * num_kv_heads


@dataclass(frozen=True, slots=True)
class PlanRules:
    """The common part of all plans of a model on a device. `group`: query heads per KV head."""

    group: int
    num_kv_heads: int
    configs: AttentionConfigs
    num_sms: int
    split_keys: int = SPLIT_KEYS

    def num_workers(self, num_seqs: int, max_splits: int) -> int:
        return workers_for(num_seqs * max_splits, self.num_kv_heads, self.num_sms)


def plan_attention(
    query_lens: npt.NDArray[np.integer],  # [num_seqs], each at least 1
    context_lens: npt.NDArray[np.integer],  # [num_seqs]
    rules: PlanRules,
) -> AttentionPlan:
    """Plans a batch."""
    configs, split_keys = rules.configs, rules.split_keys
    decode_seqs = np.flatnonzero(query_lens == 1).astype(np.int32)
    max_splits = most_splits(int(context_lens[decode_seqs].max(initial=0)), split_keys)
    num_workers = rules.num_workers(len(decode_seqs), max_splits)
    tiles = tiles_of(query_lens, context_lens, configs.prefill.rows // rules.group, least=2)
    return AttentionPlan(configs, len(query_lens), max_splits, split_keys, num_workers, decode_seqs, tiles)


def plan_tiles(
    query_lens: npt.NDArray[np.integer],  # [num_seqs], each at least 1
    context_lens: npt.NDArray[np.integer],  # [num_seqs]
    group: int,
    configs: AttentionConfigs,
) -> AttentionPlan:
    """Plans a batch with all sequences as tiles, without splits. `group`: query heads per KV head."""
    tiles = tiles_of(query_lens, context_lens, configs.prefill.rows // group)
    return AttentionPlan(configs, len(query_lens), 1, SPLIT_KEYS, 1, NO_SEQS, tiles)


def plan_decode(
    num_seqs: int,
    max_context_len: int,
    num_kv_heads: int,
    configs: AttentionConfigs,
    num_sms: int,
    split_keys: int = SPLIT_KEYS,
) -> AttentionPlan:
    """Plans a batch with one query per sequence and contexts of 0 (padding) to `max_context_len` tokens."""
    max_splits = most_splits(max_context_len, split_keys)
    num_workers = workers_for(num_seqs * max_splits, num_kv_heads, num_sms)
    decode_seqs, no_tiles = np.arange(num_seqs, dtype=np.int32), np.empty((0, 2), dtype=np.int32)
    return AttentionPlan(configs, num_seqs, max_splits, split_keys, num_workers, decode_seqs, no_tiles)


def plan_padded(num_tokens: int, num_seqs: int, max_context_len: int, rules: PlanRules) -> AttentionPlan:
    """Makes a plan for any step of fewer than `num_tokens` tokens, including prompts, in up to `num_seqs` sequences.

    An additional sequence has no tokens and no context. All entries of `decode_seqs` and `tiles` refer to it; a graph
    reads the actual entries from its buffers. For padding, decode attention writes its result after the step's tokens.
    """
    configs, split_keys = rules.configs, rules.split_keys
    max_splits = most_splits(max_context_len, split_keys)
    num_workers = rules.num_workers(num_seqs, max_splits)
    decode_seqs, tiles = padded_items(NO_SEQS, NO_SEQS, num_tokens, num_seqs, rules.group, configs)
    return AttentionPlan(configs, num_seqs + 1, max_splits, split_keys, num_workers, decode_seqs, tiles)


def padded_items(
    query_lens: npt.NDArray[np.integer],  # [number of sequences], up to num_seqs
    context_lens: npt.NDArray[np.integer],
    num_tokens: int,
    num_seqs: int,
    group: int,
    configs: AttentionConfigs,
) -> tuple[Ids, Ids]:
    """Returns a step's `decode_seqs` [num_seqs] and `tiles` [most_tiles, 2], padded with the index `num_seqs`."""
    queries = configs.prefill.rows // group
    decode_seqs = np.full(num_seqs, num_seqs, dtype=np.int32)
    found = np.flatnonzero(query_lens == 1)
    decode_seqs[: len(found)] = found
    tiles = np.zeros((most_tiles(num_tokens, num_seqs, queries), 2), dtype=np.int32)
    tiles[:, 0] = num_seqs
    needed = tiles_of(query_lens, context_lens, queries, least=2)
    tiles[: len(needed)] = needed
    return decode_seqs, tiles


def most_tiles(num_tokens: int, num_seqs: int, queries: int) -> int:
    """Returns the most tiles of `queries` queries that a step's sequences of two or more tokens can have."""
    return num_tokens // queries + min(num_seqs, num_tokens // 2)


def tiles_of(
    query_lens: npt.NDArray[np.integer], context_lens: npt.NDArray[np.integer], queries: int, least: int = 1
) -> Ids:
    """Returns [num_tiles, 2]: the sequence and first query of each tile of `queries` queries, those with most keys
    first.

    Sequences with fewer than `least` queries have no tiles.
    """
    counts = np.where(query_lens >= least, -(-query_lens // queries), 0)
    seqs = np.repeat(np.arange(len(query_lens)), counts)
    first = (np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    num_keys = np.minimum((context_lens - query_lens)[seqs] + first + queries, context_lens[seqs])
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((seqs, first), axis=1)[order].astype(np.int32)


def most_splits(longest_context: int, split_keys: int = SPLIT_KEYS) -> int:
    """Returns the most splits that a context of up to `longest_context` tokens can have, with or without a window."""
    return max(1, min(MAX_SPLITS, -(-longest_context // split_keys)))


def workers_for(num_items: int, num_kv_heads: int, num_sms: int) -> int:
    """Returns the number of programs per KV head that take `num_items` splits: at most as many as run concurrently."""
    return max(1, min(num_items, -(-PROGRAMS_PER_SM * num_sms // num_kv_heads)))
