"""What a fused decoder computes between its linear layers: one interface, here in torch operations.

`pd_cluster.model.cpu.ops` has the same in C, for float32, `pd_cluster.model.cuda.ops` in Triton. Rows are tokens:
activations are [num_tokens, features]; norms compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.nn.functional import gelu, silu

from pd_cluster.model.attention import sdpa
from pd_cluster.model.batch import ForwardBatch

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm. Where an architecture multiplies by 1 + w, `weight` is that sum, in float32.

    A normed value is rounded to the weight's dtype before it is multiplied.
    """

    weight: torch.Tensor  # [features]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One layer's attention, as its projections leave it: queries, keys, values side by side in each row."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin of a step's tokens, each [num_tokens, head_dim]; both halves of a row are the same."""

    cos: torch.Tensor
    sin: torch.Tensor


class Ops(Protocol):
    name: str
    attention: str  # what attends, for the log

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[num_rows, features], normed; x stays."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x += delta in place; returns x normed."""

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[num_rows, 2 * features] to [num_rows, features]: activation of the left half times the right half."""

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] to [num_tokens, num_heads * head_dim].

        Norms and rotates, writes keys and values to the pool's slots, attends. May overwrite qkv.
        """


class TorchOps:
    """The reference, and what serves where the C kernels cannot be built."""

    name = "torch"
    attention = "SDPA"

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (normed.to(norm.weight.dtype) * norm.weight).to(x.dtype)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.norm(x.add_(delta), norm)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")).mul_(up)

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        num_kv, dim = heads.num_kv_heads, heads.head_dim
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), [heads.num_heads, num_kv, num_kv], dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            query, key = self.norm(query, heads.q_norm), self.norm(key, heads.k_norm)
        query, key = _rotate(query, rope), _rotate(key, rope)
        output = sdpa.write_and_attend(
            heads.layer_idx,
            query.transpose(0, 1),
            key,
            value,
            batch,
            sdpa.Scoring(heads.scaling, heads.sliding_window, heads.softcap),
        )
        return output.reshape(len(qkv), -1)


def _rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * rope.cos[:, None] + torch.cat((-right, left), dim=-1) * rope.sin[:, None]
