"""Operations of a fused decoder: one interface, implemented here in torch.

kernels/cpu/ops.py has the same in C, for float32, kernels/cuda/ops.py in Triton. Rows are tokens:
activations are [num_tokens, features]; norms compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.activations import gelu_tanh, sigmoid, silu
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.attention.latent_attention import attend_latents, write_latents
from pd_cluster.model.layers.attention.sparse_selection import IndexRows, choose_keys
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertLayers, ExpertWeights
from pd_cluster.model.layers.gated_mlp import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, Activation, ExpertRouter, Experts, Gates
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.states.recurrent_kernels import NativeStates, RecurrentKernel, StateShape
from pd_cluster.native.recurrence_values import Convolution, GatedDelta, Mamba2


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm. Where an architecture multiplies by 1 + w, `weight` is that sum, in float32.

    A normed value is rounded to the weight's dtype before the multiplication.
    """

    weight: torch.Tensor  # [features]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One layer's attention on the output of its projections: queries, keys, values side by side in each row."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None  # [num_heads]: scores of one more key, whose value is zero (gpt-oss)
    first_key: int = 0  # slots before it are not seen; others than 0 in the C kernels only

    @property
    def scoring(self) -> sdpa.Scoring:
        return sdpa.Scoring(self.scaling, self.sliding_window, self.softcap, self.sinks)


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """One layer's latent attention (MLA) on the output of its projections; see attention/latent.py."""

    layer_idx: int
    norm: Norm  # of the latent
    keys: torch.Tensor  # [num_heads, width of a query without its rotated part, width]
    values: torch.Tensor  # [num_heads, width, value_width]
    rope_width: int
    scaling: float
    first_key: int = 0  # as in Heads

    @property
    def num_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def query_width(self) -> int:
        return self.keys.shape[1]

    @property
    def width(self) -> int:
        return self.keys.shape[2]

    @property
    def value_width(self) -> int:
        return self.values.shape[2]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """cos and sin of a step's tokens, each [num_tokens, head_dim]; both halves of a row are the same.

    They have the activations' dtype, or float32: then the rotation is rounded once, at its end.
    """

    cos: torch.Tensor
    sin: torch.Tensor


Rows = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, hidden_size] to the same shape


class Ops(Gates, Protocol):
    """`is_capturable`: on an accelerator nothing here reads from the device, so that a graph can hold all of it."""

    name: str
    attention: str  # the attention in use, for the log
    is_capturable: bool

    def linear(self, weight: LinearWeight) -> Linear:
        """Returns the layer that computes with this weight, whose other references the caller drops."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Returns x [num_rows, features] normed, and leaves it unchanged."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Adds delta to x in place; returns x normed."""

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        """Returns a function for a sparse block; `weights` have gates before ups.

        The caller drops the weights. Raises ModelError if their form cannot have this order. `share`: the weights are
        those of this rank's experts; the router's are all. Raises ConfigError if it cannot be computed.

        On accelerators the host need not know which experts are chosen.
        """

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        """Maps [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] to [num_tokens, num_heads * head_dim].

        Norms and rotates, writes keys and values to the pool's slots, attends. May overwrite qkv.
        """

    def takes_states(self, shape: StateShape, device: torch.device) -> bool:
        """Whether `recurrent` has kernels for layers of this shape, whose weights are on this device."""

    def recurrent(self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None) -> RecurrentKernel:
        """Returns what computes a recurrent layer between its projections; it has copies of the weights."""


@runtime_checkable
class LatentOps(Ops, Protocol):
    """`Ops` that have latent attention."""

    def attend_latents(
        self, latents: Latents, queries: torch.Tensor, kept: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        """Maps queries [num_tokens, num_heads * (query_width + rope_width)] to [num_tokens, num_heads * value_width].

        `kept` [num_tokens, width + rope_width] is normed and rotated here and written to the pool's slots. A token sees
        the keys of `batch.chosen`.
        """


@runtime_checkable
class SparseOps(LatentOps, Protocol):
    """`LatentOps` whose tokens may attend to some keys alone: to those of `ForwardBatch.chosen`, if there are any."""

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        """Writes the keys to the layer's third plane; returns what `ForwardBatch.chosen` shall be.

        `rope`: the tables by which the rows were rotated.
        """


class TorchOps:
    """The reference, also used where the C kernels cannot be built."""

    name = "torch"
    attention = "SDPA"
    is_capturable = False  # SDPA reads lengths on the host

    def linear(self, weight: LinearWeight) -> Linear:
        return weight.linear()

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (normed.to(norm.weight.dtype) * norm.weight).to(x.dtype)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.norm(x.add_(delta), norm)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "swigluoai":
            gate = gate.clamp(max=SWIGLUOAI_LIMIT)
            gate = gate * sigmoid(gate * SWIGLUOAI_ALPHA)
            return (up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT) + 1).mul_(gate)
        return (silu(gate) if activation == "silu" else gelu_tanh(gate)).mul_(up)

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        return Experts(router, ExpertLayers(weights), self, activation, share)

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        num_kv, dim = heads.num_kv_heads, heads.head_dim
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), [heads.num_heads, num_kv, num_kv], dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            query, key = self.norm(query, heads.q_norm), self.norm(key, heads.k_norm)
        query, key = rotate(query, rope), rotate(key, rope)
        output = sdpa.write_and_attend(heads.layer_idx, query.transpose(0, 1), key, value, batch, heads.scoring)
        return output.reshape(len(qkv), -1)

    def attend_latents(
        self, latents: Latents, queries: torch.Tensor, kept: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        latent = self.norm(kept[:, : latents.width].contiguous(), latents.norm)
        rotated = rotate(kept[:, None, latents.width :], rope)  # [num_tokens, 1, rope_width]
        write_latents(latents.layer_idx, latent[:, None], rotated, batch)
        apart = queries.view(len(queries), latents.num_heads, -1)
        ends = rotate(apart[..., latents.query_width :], rope)
        whole = torch.cat((apart[..., : latents.query_width], ends), dim=-1).transpose(0, 1)
        output = attend_latents(latents.layer_idx, latents.keys, latents.values, whole, batch, latents.scaling)
        return output.reshape(len(queries), -1)

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        return choose_keys(rows, batch)

    def takes_states(self, shape: StateShape, device: torch.device) -> bool:
        return NativeStates.takes(shape, device)

    def recurrent(self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None) -> RecurrentKernel:
        """Token by token in torch it would take minutes, so this is in C."""
        return NativeStates.of(convolution, recurrence)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates x [num_tokens, num_heads, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    rotated = x * rope.cos[:, None] + torch.cat((-right, left), dim=-1) * rope.sin[:, None]
    return rotated.to(x.dtype)
