"""A decoder layer taken apart: an attention, an MLP, and the norms around them.

An attention is one object, which owns its projections and what it keeps of a token: it writes this to the pool, and
attends. `HeadsAttention` keeps keys and values; `LatentAttention` (MLA) what all heads' keys and values are made of;
states/recurrent.py has layers that keep a state of each sequence instead.
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
        """The projection behind it, from what `attend` returns to [num_rows, hidden_size]."""

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Maps [num_tokens, hidden_size], normed, to what each token's heads add up, side by side in a row.

        Writes what it keeps of these tokens to the batch's pool first. `ropes`: the step's tables by kind of layer.
        """


@dataclass(frozen=True, slots=True)
class HeadsAttention:
    """Attends with heads of queries over heads of keys and values, which one projection makes.

    `rope`: the kind of layer whose tables rotate its heads. `spanning` norms parts of the rows of `qkv`, each over all
    its heads.
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
    """Likewise, and each head's features are multiplied by the sigmoids of their gates, which `qkv` makes behind it."""

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
    """Attends over the latents of all heads' keys and values (MLA), in which its queries are absorbed.

    `down` makes the rows of queries, or what they are made of, and behind them those of the latent and its rotated
    part. With `query_norm`, `up` makes queries of the first; otherwise `down` has made them. `indexer` chooses the keys
    that are seen here, and in the layers behind this one that have none.
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
    """One decoder layer. The two `post_*` norms are of what each half adds to the residual stream.

    Without `input_norm` and `mlp_norm` the halves read the residual stream as it is.
    """

    attention: LayerAttention
    mlp: Callable[[torch.Tensor], torch.Tensor] | None  # None: the layer ends behind the attention
    input_norm: Norm | None = None
    mlp_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    residual_multiplier: float = 1.0  # of what each half adds
