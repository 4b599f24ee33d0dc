"""A decoder layer in parts: an attention, an MLP, and the norms around them.

An attention object owns its projections and its part of the KV cache: it writes each token's entry to the pool, then
attends. `HeadsAttention` stores keys and values; `LatentAttention` (MLA) stores the latents of all heads' keys and
values; the layers in states/recurrent_layers.py store one state per sequence instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.activations import sigmoid
from pd_cluster.model.layers.attention.sparse_indexer import Indexer
from pd_cluster.model.layers.ops import Heads, LatentOps, Latents, Norm, Ops, Rope
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.rope.rope_tables import WHOLE_MODEL


class LayerAttention(Protocol):
    @property
    def output(self) -> Linear:
        """The output projection, which maps the result of `attend` to [num_rows, hidden_size]."""

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Maps normed rows [num_tokens, hidden_size] to the concatenated outputs of each token's heads.

        First writes these tokens' cache entries to the batch's pool. `ropes`: the step's tables by kind of layer.
        """


@dataclass(frozen=True, slots=True)
class HeadsAttention:
    """Attention with heads. One projection, `qkv`, computes queries, keys and values.

    `rope`: the kind of layer whose tables rotate the heads. `spanning`: norms that apply to parts of the `qkv` rows,
    each across all heads of the part.
    """

    heads: Heads
    qkv: Linear
    output: Linear
    ops: Ops
    rope: str = WHOLE_MODEL
    spanning: tuple[tuple[slice, Callable[[torch.Tensor], torch.Tensor]], ...] = ()

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        qkv = self.qkv(x)
        for part, norm in self.spanning:
            qkv[:, part] = norm(qkv[:, part].contiguous())
        return self.ops.attend(self.heads, qkv, ropes[self.rope], batch.of_layer(self.heads.layer_idx))


@dataclass(frozen=True, slots=True)
class GatedHeadsAttention:
    """HeadsAttention with gates: the sigmoid of a gate multiplies each output; `qkv` computes the gates after the
    values.
    """

    inner: HeadsAttention
    output: Linear

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        heads, inner = self.inner.heads, self.inner
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        qkv, gates = (part.contiguous() for part in inner.qkv(x).tensor_split([width], dim=1))
        attended = inner.ops.attend(heads, qkv, ropes[inner.rope], batch.of_layer(heads.layer_idx))
        return attended.mul_(sigmoid(gates))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over the latents of all heads' keys and values (MLA), with absorbed queries.

    `down` computes the queries (or their low-rank input), followed by the latent and its rotated part. With
    `query_norm`, `up` computes the queries from the low-rank input. `indexer` chooses the keys for this layer and for
    later layers without an indexer.
    """

    latents: Latents
    down: Linear
    output: Linear
    ops: LatentOps
    query_norm: Norm | None = None
    up: Linear | None = None
    indexer: Indexer | None = None
    rope: str = WHOLE_MODEL

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        rows = self.down(x)
        kept = self.latents.width + self.latents.rope_width
        queries, keys = rows[:, :-kept].contiguous(), rows[:, -kept:].contiguous()
        if self.up is not None and self.query_norm is not None:
            queries = self.ops.norm(queries, self.query_norm)
            if self.indexer is not None:
                self.indexer.choose(x, queries, ropes[WHOLE_MODEL], batch)
            queries = self.up(queries)
        return self.ops.attend_latents(self.latents, queries, keys, ropes[self.rope], batch)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer. The two `post_*` norms apply to what each half adds to the residual stream.

    Without `input_norm` and `mlp_norm` the halves read the residual stream itself.
    """

    attention: LayerAttention
    mlp: Callable[[torch.Tensor], torch.Tensor] | None  # None: the layer has no second half
    input_norm: Norm | None = None
    mlp_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    residual_multiplier: float = 1.0  # multiplies what each half adds
