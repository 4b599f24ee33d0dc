"""Chooses the keys that a token attends to in sparse latent attention (DSA), by an indexer's separate queries and keys.

A key's score is the sum over the indexer's heads of the head's weight times relu(query · key), in float32. A token
attends to the `index_topk` keys with the highest scores; if scores are equal, to the earlier key. A token with at most
`index_topk` visible keys attends to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows
from pd_cluster.model.layers.ops import Rope, SparseOps
from pd_cluster.model.layers.packed_linear import Linear


@dataclass(slots=True, eq=False)
class Indexer:
    """The indexer of one layer. The first features of its queries and keys are rotated, as halves."""

    layer_idx: int
    queries: Linear  # from the input of the attention's query projection, to [num_rows, num_heads * width]
    keys: Linear  # from the layer's normed rows, to [num_rows, width]
    weights: Linear  # from the layer's normed rows, to [num_rows, num_heads]
    norm: IndexNorm
    scaling: float
    index_topk: int  # smaller during the proof at load
    weighs_in_float32: bool  # whether `weights` has float32 weights although other layers have 16 bits
    ops: SparseOps

    def choose(self, x: torch.Tensor, residual: torch.Tensor, rope: Rope, batch: ForwardBatch) -> None:
        """Sets `batch.chosen` for this layer's attention, and for later layers without an indexer.

        `residual` [num_tokens, …]: the input of the attention's query projection.
        """
        weights = self.weights(x.float() if self.weighs_in_float32 else x).float().mul_(self.scaling)
        queries, keys = self.queries(residual).view(*weights.shape, -1), self.keys(x)
        queries, keys = self.ops.prepare_index(queries, keys, self.norm, rope)
        rows = IndexRows(self.layer_idx, queries, weights, keys, self.index_topk)
        batch.chosen = self.ops.choose_keys(rows, rope, batch)
