"""Sparse latent attention (DSA) on NPUs, by two operators of torch-npu: one chooses keys, one attends to them.

The first operator takes 64 heads of 128 numbers; fewer heads are filled up with zeros, which add nothing to a score.
Among keys with equal scores, its choice is not specified. Both operators read lengths on the device, and a token with
few keys attends to all of them, so graphs need no values from the host. `problem` reports at load what the operators do
not support. Nothing here has run on hardware.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pd_cluster.kv.kv_layout import INDEX, KVLayout
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.npu import npu_latents
from pd_cluster.model.kernels.npu.npu_attention import CAUSAL, tables_of
from pd_cluster.model.kernels.npu.npu_latents import NpuLatentOps, padded_heads, takes_widths
from pd_cluster.model.layers.attention.sparse_selection import IndexRows
from pd_cluster.model.layers.ops import Latents, Rope

INDEX_HEADS, INDEX_WIDTH = 64, 128
MAX_CHOSEN = 2048
ABSORBED = 2  # `attention_mode`: keys and values are latents


def problem(layout: KVLayout, num_heads: int, num_index_heads: int, most: int, max_num_seqs: int) -> str:
    """Returns why the operators do not support this pool and model; "" if they do."""
    if not takes_widths(layout):
        return "it has latents of widths other than {} and {}".format(*npu_latents.WIDTHS)
    if layout.width_of(INDEX) != INDEX_WIDTH or num_index_heads > INDEX_HEADS:
        heads = f"{num_index_heads} heads of {layout.width_of(INDEX)} numbers"
        return f"its indexer has {heads}, but the operator takes up to {INDEX_HEADS} of {INDEX_WIDTH}"
    if most > MAX_CHOSEN:
        return f"index_topk is {most}, but the operator chooses at most {MAX_CHOSEN}"
    return npu_latents.problem(layout, num_heads, max_num_seqs)


class _SparseStep(NamedTuple):
    """A step's metadata on the device, for all its layers; int32."""

    tables: torch.Tensor  # [num_seqs, width]: blocks, then arbitrary valid ids
    query_ends: torch.Tensor  # [num_seqs] running sums of the query lengths
    context_lens: torch.Tensor  # [num_seqs]; 1 for padding, whose result is not read


class NpuSparseOps(NpuLatentOps):
    """`NpuLatentOps` whose tokens attend to the keys in `ForwardBatch.chosen`, in the order of the operator."""

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        plane = batch.pool.planes(rows.layer_idx)[2]
        torch.ops.npu.npu_scatter_nd_update_(
            plane.view(-1, plane.shape[3]), batch.slot_mapping[:, None], rows.keys.contiguous()
        )
        if rows.layer_idx == 0 or not isinstance(batch.kernel_state, _SparseStep):
            ends, lens = batch.query_starts[1:].contiguous(), batch.context_lens.clamp(min=1)
            batch.kernel_state = _SparseStep(tables_of(batch), ends, lens)
        step, weights = batch.kernel_state, rows.weights.to(rows.queries.dtype)
        chosen: torch.Tensor = torch.ops.npu.npu_lightning_indexer(
            padded_heads(rows.queries, INDEX_HEADS),
            plane,
            padded_heads(weights[..., None], INDEX_HEADS)[..., 0],
            actual_seq_lengths_query=step.query_ends,
            actual_seq_lengths_key=step.context_lens,
            block_table=step.tables,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=rows.most,
            sparse_mode=CAUSAL,
        )[0]
        return chosen[:, 0]

    def _summed(
        self, latents: Latents, absorbed: torch.Tensor, turned: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        latent_pool, rope_pool = batch.pool.layer(latents.layer_idx)
        step = batch.kernel_state
        assert isinstance(step, _SparseStep)
        assert batch.chosen is not None
        found: torch.Tensor = torch.ops.npu.npu_sparse_flash_attention(
            absorbed,
            latent_pool,
            latent_pool,
            batch.chosen[:, None],
            latents.scaling,
            block_table=step.tables,
            actual_seq_lengths_query=step.query_ends,
            actual_seq_lengths_kv=step.context_lens,
            query_rope=turned,
            key_rope=rope_pool,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=CAUSAL,
            attention_mode=ABSORBED,
        )[0]
        return found
