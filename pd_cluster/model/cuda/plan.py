"""How a step's attention is cut into programs: integers from lengths, on the host. Knows nothing of tensors or kernels.

Which splits have keys is decided by the kernels, from context_lens. So a plan of `plan_decode` holds for every batch of
that size: a CUDA graph that was captured with it is replayed with other contexts and tables in the same buffers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_cluster.model.cuda.attention_configs import AttentionConfigs

MAX_SPLITS = 128
PROGRAMS_PER_SM = 2  # that run side by side, to have enough bytes under way
START_TILES = 2  # what starting a program costs, in tiles of keys; the merge costs as much again

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Sequences with one query are decoded, `num_splits` programs for each KV head; the others' queries form tiles.

    `tiles` and `decode_seqs` go to the device with the batch (`BatchMetadata`).
    """

    configs: AttentionConfigs
    num_seqs: int
    num_splits: int
    decode_seqs: Ids  # [num_decode] ascending
    tiles: Ids  # [num_tiles, 2]: sequence, first query of the tile; most keys first

    @property
    def all_decode(self) -> bool:
        return len(self.decode_seqs) == self.num_seqs

    def workspace_numel(self, num_heads: int, head_dim: int) -> int:
        """float32 elements that the splits need: output and log-sum-exp of each."""
        return 0 if self.num_splits == 1 else len(self.decode_seqs) * num_heads * self.num_splits * (head_dim + 1)


def plan_attention(
    query_lens: npt.NDArray[np.integer],  # [num_seqs], each at least 1
    context_lens: npt.NDArray[np.integer],  # [num_seqs]
    group: int,
    num_kv_heads: int,
    configs: AttentionConfigs,
    num_sms: int,
    num_splits: int | None = None,
) -> AttentionPlan:
    """`group`: query heads of one KV head. A given `num_splits` makes a row independent of the others' number."""
    decode_seqs = np.flatnonzero(query_lens == 1).astype(np.int32)
    if num_splits is None:
        longest = int(context_lens[decode_seqs].max(initial=0))
        num_splits = splits_for(len(decode_seqs), num_kv_heads, longest, configs.decode.keys, num_sms)
    tiles = _tiles(query_lens, context_lens, configs.prefill.rows // group)
    return AttentionPlan(configs, len(query_lens), num_splits, decode_seqs, tiles)


def plan_decode(
    num_seqs: int,
    max_context_len: int,
    num_kv_heads: int,
    configs: AttentionConfigs,
    num_sms: int,
    num_splits: int | None = None,
) -> AttentionPlan:
    """For a padded batch whose sequences have one query each, and contexts from 0 (padding) to `max_context_len`."""
    if num_splits is None:
        num_splits = splits_for(num_seqs, num_kv_heads, max_context_len, configs.decode.keys, num_sms)
    return AttentionPlan(
        configs, num_seqs, num_splits, np.arange(num_seqs, dtype=np.int32), np.empty((0, 2), dtype=np.int32)
    )


def _tiles(query_lens: npt.NDArray[np.integer], context_lens: npt.NDArray[np.integer], queries: int) -> Ids:
    """Tiles of `queries` queries for all sequences that have more than one."""
    counts = np.where(query_lens > 1, -(-query_lens // queries), 0)
    seqs = np.repeat(np.arange(len(query_lens)), counts)
    first = (np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    num_keys = np.minimum((context_lens - query_lens)[seqs] + first + queries, context_lens[seqs])
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((seqs, first), axis=1)[order].astype(np.int32)


def splits_for(num_seqs: int, num_kv_heads: int, longest_context: int, keys: int, num_sms: int) -> int:
    """The number with the least (rounds of programs) * (tiles of each), the smallest of equals."""
    return _splits(num_seqs * num_kv_heads, -(-longest_context // keys), PROGRAMS_PER_SM * num_sms)


@functools.lru_cache(4096)
def _splits(num_programs: int, num_tiles: int, num_places: int) -> int:
    if num_programs == 0 or num_tiles == 0:
        return 1

    def cost(num_splits: int) -> int:
        per_split = -(-num_tiles // num_splits)
        rounds = -(-num_programs * -(-num_tiles // per_split) // num_places)
        return rounds * (per_split + START_TILES) + (START_TILES if num_splits > 1 else 0)

    return min(range(1, min(num_tiles, MAX_SPLITS) + 1), key=cost)
