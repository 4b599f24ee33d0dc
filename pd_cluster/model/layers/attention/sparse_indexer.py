"""Chooses the keys that a token attends to in sparse latent attention (DSA), by separate keys of an indexer.

A key's score is the sum over the indexer's heads of the head's weight times relu(query · key), in float32. A token
attends to the `index_topk` keys with the highest scores; if scores are equal, to the earlier key. A token with at most
`index_topk` visible keys attends to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.attention.sparse_selection import IndexRows
from pd_cluster.model.layers.ops import Rope, SparseOps, rotate
from pd_cluster.model.layers.packed_linear import Linear


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """A layer norm with a bias, for an indexer's keys [num_rows, width]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(slots=True, eq=False)
class Indexer:
    """The indexer of one layer. The first `rope_width` features of its queries and keys are rotated, as halves."""

    layer_idx: int
    queries: Linear  # from the input of the attention's query projection, to [num_rows, num_heads * width]
    keys: Linear  # from the layer's normed rows, to [num_rows, width]
    weights: Linear  # from the layer's normed rows, to [num_rows, num_heads]
    norm: IndexNorm
    scaling: float
    rope_width: int
    index_topk: int  # the proof at load sets a smaller value
    ops: SparseOps

    def choose(self, x: torch.Tensor, residual: torch.Tensor, rope: Rope, batch: ForwardBatch) -> None:
        """Sets `batch.chosen` for this layer's attention, and for later layers without an indexer.

        `residual` [num_tokens, …]: the input of the attention's query projection.
        """
        weights = self.weights(x).mul_(self.scaling)
        keys = self._rotated(self.norm(self.keys(x))[:, None], rope)[:, 0]
        queries = self._rotated(self.queries(residual).view(*weights.shape, -1), rope)
        rows = IndexRows(self.layer_idx, queries, weights, keys, self.index_topk)
        batch.chosen = self.ops.choose_keys(rows, rope, batch)

    def _rotated(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Rotates x [num_tokens, num_heads, width]."""
        return torch.cat((rotate(x[..., : self.rope_width], rope), x[..., self.rope_width :]), dim=-1)
