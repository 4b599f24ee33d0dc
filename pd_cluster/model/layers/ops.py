"""The operations of a fused decoder: their interface, and an implementation in torch.

kernels/cpu/ops.py implements them in C, for float32, and kernels/cuda/ops.py in Triton. Rows are tokens: activations
are [num_tokens, features]. Norms compute in float32.
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
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows, choose_keys
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertLayers, ExpertWeights
from pd_cluster.model.layers.gated_mlp import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, Activation, ExpertRouter, Experts, Gates
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.states.recurrent_kernels import NativeStates, RecurrentKernel, StateShape
from pd_cluster.native.recurrence_values import Convolution, GatedDelta, Mamba2


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm. If an architecture multiplies by 1 + w, `weight` is 1 + w in float32.

    A normed value is rounded to the weight's dtype before it is multiplied.
    """

    weight: torch.Tensor  # [features]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One layer's attention on the output of its projections: queries, keys and values, concatenated in each row."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None  # [num_heads]: scores of an additional key whose value is zero (gpt-oss)
    first_key: int = 0  # earlier slots are masked; nonzero only with the C kernels

    @property
    def scoring(self) -> sdpa.Scoring:
        return sdpa.Scoring(self.scaling, self.sliding_window, self.softcap, self.sinks)


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """One layer's latent attention (MLA) on the output of its projections; see attention/latent_attention.py."""

    layer_idx: int
    norm: Norm  # applied to the latent
    keys: torch.Tensor  # [num_heads, query_width, width]
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
    """cos and sin for a step's tokens, each [num_tokens, head_dim]; the two halves of a row are equal.

    Their dtype is the activations' or float32. With float32 the rotation is rounded only once, at the end.
    """

    cos: torch.Tensor
    sin: torch.Tensor


Rows = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, hidden_size] -> [num_rows, hidden_size]


class Ops(Gates, Protocol):
    """`is_capturable`: on an accelerator the host never reads from the device, so graphs can capture everything."""

    name: str
    attention: str  # name of the attention in use, for the log
    is_capturable: bool

    @property
    def prompt_states(self) -> str:
        """Returns the library that computes prompts in recurrent layers; "": the kernels for single tokens do."""

    def linear(self, weight: LinearWeight) -> Linear:
        """Returns the layer that computes with this weight; the caller then drops its references to the weight."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Returns the norm of x [num_rows, features]; leaves x unchanged."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Adds delta to x in place; returns the normed sum."""

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        """Returns the function of a sparse block; `weights` have gates before ups.

        The caller drops the weights. Raises ModelError if their form cannot be reordered. `share`: `weights` are only
        this rank's experts, while `router` covers all. Raises ConfigError if this device cannot compute a share.

        On accelerators the host does not wait to learn which experts are chosen.
        """

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        """Maps [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] to [num_tokens, num_heads * head_dim].

        Applies norms and rope, writes keys and values to the pool's slots, then attends. May overwrite qkv.
        """

    def takes_states(self, shape: StateShape, device: torch.device) -> bool:
        """Whether `recurrent` has kernels for layers of this shape with weights on this device."""

    def recurrent(self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None) -> RecurrentKernel:
        """Returns the kernel for the work between a recurrent layer's projections; the kernel copies the weights."""


@runtime_checkable
class LatentOps(Ops, Protocol):
    """`Ops` with latent attention. `wide_latents`: `Latents.keys` and `values` are float32 although rows are 16-bit."""

    wide_latents: bool

    def attend_latents(
        self, latents: Latents, queries: torch.Tensor, kept: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        """Maps queries [num_tokens, num_heads * (query_width + rope_width)] to [num_tokens, num_heads * value_width].

        Applies the norm and rope to `kept` [num_tokens, width + rope_width] and writes it to the pool's slots. A token
        attends to the keys in `batch.chosen`, which the same operations have chosen.
        """


@runtime_checkable
class SparseOps(LatentOps, Protocol):
    """`LatentOps` whose tokens can attend to only some keys: those in `ForwardBatch.chosen`, if it is set."""

    def prepare_index(
        self, queries: torch.Tensor, keys: torch.Tensor, norm: IndexNorm, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms an indexer's keys [num_tokens, width]; rotates the first features of these and of its queries.

        `queries` [num_tokens, num_heads, width] may be overwritten. `rope` is as wide as the rotated part.
        """

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        """Writes the index keys to the layer's third plane; returns the new value of `ForwardBatch.chosen`.

        `rope`: the tables that rotated the rows.
        """


class TorchOps:
    """The reference implementation, which also replaces the C kernels if they cannot be built."""

    name = "torch"
    attention = "SDPA"
    prompt_states = ""
    is_capturable = False  # SDPA reads lengths on the host
    wide_latents = True

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

    def prepare_index(
        self, queries: torch.Tensor, keys: torch.Tensor, norm: IndexNorm, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return prepared_index(queries, keys, norm, rope)

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        return choose_keys(rows, batch)

    def takes_states(self, shape: StateShape, device: torch.device) -> bool:
        return NativeStates.takes(shape, device)

    def recurrent(self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None) -> RecurrentKernel:
        """Returns the C kernel, because a loop over tokens in torch would take minutes."""
        return NativeStates.of(convolution, recurrence)


def prepared_index(
    queries: torch.Tensor, keys: torch.Tensor, norm: IndexNorm, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SparseOps.prepare_index`."""
    width, keys = rope.cos.shape[1], norm(keys)[:, None]
    queries, keys = (torch.cat((rotate(x[..., :width], rope), x[..., width:]), dim=-1) for x in (queries, keys))
    return queries, keys[:, 0]


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates x [num_tokens, num_heads, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    rotated = x * rope.cos[:, None] + torch.cat((-right, left), dim=-1) * rope.sin[:, None]
    return rotated.to(x.dtype)
