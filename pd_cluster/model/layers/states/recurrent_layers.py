"""Recurrent layers of a fused model, which replace the attention and keep one state per sequence.

Their projections are packed. One kernel call (layers/states/recurrent_kernels.py) computes everything between the
projections, and reads and writes the states in their blocks. This file also has layers that combine a state and an
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.fused_layer import LayerAttention
from pd_cluster.model.layers.ops import Rope, Rows
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.states.recurrent_kernels import RecurrentKernel
from pd_cluster.native.recurrence_values import StateInputs


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A layer's state, and the kernel that advances it over the rows of a step."""

    layer_idx: int
    kernel: RecurrentKernel

    def through(self, inputs: StateInputs, batch: ForwardBatch) -> torch.Tensor:
        """Returns [num_tokens, num_features]; afterwards the pool holds the states after the last tokens."""
        rows = batch.states
        assert rows is not None
        out = self.kernel(inputs, rows.pool.planes(self.layer_idx), rows)
        batch.state_written(self.layer_idx)
        return out


@dataclass(frozen=True, slots=True)
class GatedState:
    """The gated delta rule with decays per head, or Mamba-2: one projection computes all inputs.

    Each row of the projection has these parts, as wide as `widths` says: convolution inputs, gates, decays (or
    Mamba-2's time steps), and betas if there are any.
    """

    layer: RecurrentLayer
    projection: Linear
    output: Linear
    widths: tuple[int, ...]
    input_multiplier: float = 1.0  # scales the projection's input
    multipliers: torch.Tensor | None = None  # [num_features]: scale the projection's output
    # Norms and gates the kernels' result; set if the kernels cannot, because the norm spans several ranks.
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        rows = self.projection(x if self.input_multiplier == 1.0 else x * self.input_multiplier)
        if self.multipliers is not None:
            rows = (rows * self.multipliers).to(rows.dtype)
        convolved, gate, decays, *betas = torch.split(rows, list(self.widths), dim=1)
        inputs = StateInputs(convolved, decays, betas[0] if betas else None, gate)
        out = self.layer.through(inputs, batch)
        return out if self.norm is None else self.norm(out, gate)


@dataclass(frozen=True, slots=True)
class KimiDeltaState:
    """The gated delta rule with decays per channel (KDA); two projections compute decays and gates.

    `widths`: the parts of the first projection's rows: convolution inputs, betas, and the inputs of decays and gates.
    """

    layer: RecurrentLayer
    projection: Linear
    decays: Linear
    gates: Linear
    output: Linear
    widths: tuple[int, int, int, int]

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        convolved, betas, decays, gates = torch.split(self.projection(x), list(self.widths), dim=1)
        inputs = StateInputs(convolved, self.decays(decays.contiguous()), betas, self.gates(gates.contiguous()))
        return self.layer.through(inputs, batch)


@dataclass(frozen=True, slots=True)
class ShortConvState:
    """A layer that is only a convolution (LFM2). Each row has three parts: the product of two is the convolution's
    input, and the third multiplies its output.
    """

    layer: RecurrentLayer
    projection: Linear
    output: Linear

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        before, after, inputs = self.projection(x).chunk(3, dim=1)
        return self.layer.through(StateInputs(before * inputs), batch).mul_(after)


@dataclass(frozen=True, slots=True)
class RecurrentWithAttention:
    """A recurrent layer and an attention with the same input, whose outputs are added (Falcon-H1)."""

    state: LayerAttention
    attention: LayerAttention
    num_features: int  # the width of the recurrent layer's rows
    attention_multiplier: float  # scales the attention's input
    output_multipliers: tuple[float, float]

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        own = self.state.attend(x, ropes, batch)
        return torch.cat((own, self.attention.attend(x * self.attention_multiplier, ropes, batch)), dim=1)

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        own, attended = (part.contiguous() for part in rows.tensor_split([self.num_features], dim=1))
        first, second = self.output_multipliers
        return self.state.output(own).mul_(first).add_(self.attention.output(attended).mul_(second))


@dataclass(frozen=True, slots=True)
class NoAttention:
    """A layer that has only an MLP and no attention (Nemotron-H)."""

    output: Rows

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        return x
