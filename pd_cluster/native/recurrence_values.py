"""Types that describe a recurrent layer: a short convolution, a recurrence, and the norm after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Gate = Literal["none", "silu after", "sigmoid after", "silu before"]
GATES: tuple[Gate, ...] = ("none", "silu after", "sigmoid after", "silu before")  # state_segments.h


class ConvHeads(NamedTuple):
    """Consecutive channels of a convolution, of `num_heads` heads, whose last inputs one state plane keeps."""

    num_heads: int
    channels: int


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A causal convolution of each channel; `has_silu`: whether each result is multiplied by its own sigmoid."""

    weight: torch.Tensor  # [num_channels, kernel]
    bias: torch.Tensor | None  # [num_channels]
    parts: tuple[ConvHeads, ...]
    has_silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """A root-mean-square norm of each head, or of each group of heads, and a gate before or after it.

    `weight`: [num_features] of one head or of all heads; None: no norm.
    """

    gate: Gate = "none"
    weight: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GatedDelta:
    """The gated delta rule. A decay is exp(-rate * softplus(decay + bias)); there is one per head, or one per channel
    of a head's keys.

    Source: "Gated Delta Networks" (Yang et al., 2024); by channel: "Kimi Linear" (2025).
    """

    num_heads: int
    num_key_heads: int
    key_width: int
    value_width: int
    decay_bias: torch.Tensor  # [num_heads], or [num_heads * key_width]
    rates: torch.Tensor  # [num_heads]: exp(A_log)
    norm: GatedNorm


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2:
    """Mamba-2's recurrence. A step is softplus(step + bias), clamped to the limits.

    Source: "Transformers are SSMs" (Dao, Gu, 2024).
    """

    num_heads: int
    num_groups: int
    head_width: int
    state_size: int
    step_bias: torch.Tensor  # [num_heads]
    rates: torch.Tensor  # exp(A_log)
    skips: torch.Tensor  # D
    step_limits: tuple[float, float]
    norm: GatedNorm


class StateInputs(NamedTuple):
    """A layer's projections for the rows of a step, by their use. Each is [num_rows, …], and rows may be strided."""

    convolved: torch.Tensor  # [num_rows, num_channels]
    decays: torch.Tensor | None = None  # [num_rows, num_heads] or [num_rows, num_heads * key_width]; Mamba-2's steps
    betas: torch.Tensor | None = None  # [num_rows, num_heads]
    gate: torch.Tensor | None = None  # shaped like the layer's output
