"""Stands for transformers' cache under modules with latent attention: it keeps latents in the paged pool.

Such a module gives its cache a step's latents, makes keys and values of all that comes back, and attends to these. So
this cache returns the latents of all sequences, one sequence after the other, and attention/sdpa.py takes them apart.
Every step makes the heads of all tokens anew: the reference for fused layers, and their stand-in.
"""

from __future__ import annotations

import numpy as np
import torch

from pd_cluster.kv.vectors import decode, encode, write_kv
from pd_cluster.model.batch import ForwardBatch, Ints, on_device


class LatentCache:
    """The latents of one step's sequences. Has what transformers' modules and masks ask of a cache."""

    is_compileable = False

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        lens, block_size = batch.host_context_lens, batch.pool.layout.block_size
        batch.key_starts = np.concatenate([[0], np.cumsum(lens)])
        self._is_past_empty = bool((lens == batch.query_lens).all())
        index: Ints = np.arange(batch.key_starts[-1]) - np.repeat(batch.key_starts[:-1], lens)  # in its sequence
        block = np.repeat(_first_blocks(lens, block_size), lens) + index // block_size
        at = on_device({"block": block, "offset": index % block_size}, batch.pool.device)
        self._blocks, self._offsets = batch.block_table.index_select(0, at["block"]).long(), at["offset"]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self,
        latent: torch.Tensor,  # [1, 1, num_tokens, width]
        rope: torch.Tensor,  # [1, 1, num_tokens, rope_width]
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a step's latents to the pool; returns those of all tokens so far, [1, 1, num_keys, …]."""
        batch, dtype = self._batch, self._batch.pool.layout.dtype
        parts = [each[0].transpose(0, 1) for each in (latent, rope)]  # [num_tokens, 1, …]
        planes = batch.pool.layer(layer_idx)
        write_kv(encode(parts[0], dtype), encode(parts[1], dtype), *planes, batch.slot_mapping)
        batch.layer_written(layer_idx, None)
        if self._is_past_empty and planes[0].dtype == latent.dtype:
            return latent, rope
        seen = (decode(plane[self._blocks, self._offsets], dtype) for plane in planes)  # each [num_keys, 1, …]
        latents, ropes = (each.transpose(0, 1)[None].to(latent.dtype) for each in seen)
        return latents, ropes


def _first_blocks(lens: Ints, block_size: int) -> Ints:
    """Returns where each sequence's blocks begin in the block table, which has as many as its tokens need."""
    nums_blocks = -(-lens // block_size)
    return np.cumsum(nums_blocks) - nums_blocks
