"""Chooses, in torch, the `most` best keys for each row by the index keys in the paged pool, in ascending order.

`ForwardBatch.chosen` [num_tokens, most] holds the positions, within the sequence, of the keys that each token attends
to. A token that sees at most `most` keys attends to all of them; its row is not read. In sparse latent attention a
layer stores the index keys as its third plane; see layers/attention/sparse_indexer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.attention.latent_attention import MOST_SCORES


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """A layer norm with a bias, for an indexer's keys [num_rows, width]."""

    weight: torch.Tensor  # float32, like `bias`
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result is rounded to the dtype of `x`."""
        return layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The output of a layer's indexer for a step's tokens. `weights`: one per head, already scaled."""

    layer_idx: int
    queries: torch.Tensor  # [num_tokens, num_heads, width]
    weights: torch.Tensor  # [num_tokens, num_heads] float32
    keys: torch.Tensor  # [num_tokens, width]
    most: int  # the number of keys that a token attends to


def choose_keys(rows: IndexRows, batch: ForwardBatch) -> torch.Tensor | None:
    """Writes the index keys to the pool; returns the chosen keys, or None if no token sees more than `most` keys."""
    queries, weights, most = rows.queries.float(), rows.weights.float(), rows.most
    plane = batch.pool.planes(rows.layer_idx)[2]
    size = plane.shape[1]
    plane.index_put_((batch.slot_mapping // size, batch.slot_mapping % size), rows.keys[:, None].to(plane.dtype))
    if batch.host_context_lens.max() <= most:
        return None
    chosen = torch.zeros(batch.num_tokens, most, dtype=torch.int32)
    query_starts, table_starts = batch.query_starts.tolist(), batch.table_starts.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        first, stop = query_starts[i : i + 2]
        table = batch.block_table[table_starts[i] : table_starts[i + 1]]
        known = plane.index_select(0, table).flatten(0, 1)[:context_len, 0].float()
        behind = context_len - stop
        most_rows = max(1, MOST_SCORES // (weights.shape[1] * context_len))
        for row in range(max(first, most - behind), stop, most_rows):
            some = slice(row, min(row + most_rows, stop))
            num_seen = behind + some.stop
            scores = (queries[some].flatten(0, 1) @ known[:num_seen].T).relu_()
            scores = torch.bmm(weights[some, None], scores.view(-1, weights.shape[1], num_seen))[:, 0]
            at = torch.arange(num_seen)
            scores.masked_fill_(at > behind + torch.arange(some.start, some.stop)[:, None], float("-inf"))
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :most]
            chosen[some] = best.sort(dim=-1).values.to(torch.int32)
    return chosen
