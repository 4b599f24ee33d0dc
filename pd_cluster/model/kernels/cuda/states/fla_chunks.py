"""Chunk kernels of flash-linear-attention (package fla) for the gated delta rule, Kimi delta attention and Mamba-2.

They advance the same states as the kernels for single tokens, but multiply chunks of 64 rows on tensor cores, in 16
bits. fla chooses their tiles by timing them. So results depend on where steps cut a prompt, and on the chosen tiles.
Mamba-2 is fla's simple gated linear attention with C as queries, B as keys, and steps times x as values; for this
attention, the host waits for the device once per call. Written for fla-core 0.6.0, which this file imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fla
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla
from torch.nn.functional import softplus

from pd_cluster.model.kernels.cuda.states.chunk_passes import ChunkPass
from pd_cluster.native.recurrence_values import GatedDelta, Mamba2, StateInputs

VERSION: str = fla.__version__
Scanned = tuple[torch.Tensor, torch.Tensor]  # results [1, num_rows, num_heads, width], and the last states


@dataclass(frozen=True, slots=True, eq=False)
class DeltaScan:
    """The gated delta rule, by heads or by channels. The tensors are float32 copies."""

    delta: GatedDelta
    bias: torch.Tensor
    rates: torch.Tensor

    @classmethod
    def of(cls, delta: GatedDelta) -> DeltaScan:
        return cls(delta, _own(delta.decay_bias), _own(delta.rates))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.delta.num_heads, self.delta.key_width, self.delta.value_width

    def __call__(self, inputs: StateInputs, options: dict[str, Any]) -> Scanned:
        delta, decays, betas = self.delta, inputs.decays, inputs.betas
        assert decays is not None
        assert betas is not None
        keys = delta.num_key_heads * delta.key_width
        parts = torch.split(inputs.convolved, [keys, keys, delta.num_heads * delta.value_width], dim=1)
        widths = (delta.key_width, delta.key_width, delta.value_width)
        qkv = [_by_head(part, width) for part, width in zip(parts, widths, strict=True)]
        beta, options = betas.float().sigmoid()[None], {**options, "use_qk_l2norm_in_kernel": True}
        if self.bias.numel() == delta.num_heads:
            g = -self.rates * softplus(decays.float() + self.bias)
            found: Scanned = chunk_gated_delta_rule(*qkv, g=g[None], beta=beta, **options)
        else:  # the kernels compute the decays, because a tensor of these would take more memory than the keys
            gates = {"use_gate_in_kernel": True, "A_log": self.rates.log(), "dt_bias": self.bias}
            found = chunk_kda(*qkv, g=_by_head(decays, delta.key_width), beta=beta, **gates, **options)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class MambaScan:
    """Mamba-2. The tensors are float32 copies."""

    mamba: Mamba2
    bias: torch.Tensor
    rates: torch.Tensor
    skips: torch.Tensor

    @classmethod
    def of(cls, mamba: Mamba2) -> MambaScan:
        return cls(mamba, _own(mamba.step_bias), _own(mamba.rates), _own(mamba.skips))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.mamba.num_heads, self.mamba.head_width, self.mamba.state_size

    def __call__(self, inputs: StateInputs, options: dict[str, Any]) -> Scanned:
        mamba = self.mamba
        assert inputs.decays is not None
        shared = mamba.num_groups * mamba.state_size
        x, b, c = torch.split(inputs.convolved, [mamba.num_heads * mamba.head_width, shared, shared], dim=1)
        steps = softplus(inputs.decays.float() + self.bias).clamp(*mamba.step_limits)  # [num_rows, num_heads]
        share = mamba.num_heads // mamba.num_groups
        keys, queries = (_by_head(each, mamba.state_size).repeat_interleave(share, dim=2) for each in (b, c))
        wide = _by_head(x, mamba.head_width).float()
        values, g = (wide * steps[None, :, :, None]).to(x.dtype), (-self.rates * steps)[None]
        # A state has a row for each feature of x and a column for each feature of B, so values come first.
        found, final = chunk_simple_gla(queries, keys, values, g=g, scale=1.0, state_v_first=True, **options)
        return found + self.skips[:, None] * wide, final


class FlaChunks:
    """Advances one layer's states over the long sequences of a step."""

    def __init__(self, recurrence: GatedDelta | Mamba2) -> None:
        self._scan = DeltaScan.of(recurrence) if isinstance(recurrence, GatedDelta) else MambaScan.of(recurrence)

    def __call__(
        self,
        inputs: StateInputs,
        convolved: torch.Tensor,
        state: torch.Tensor,
        passes: Sequence[ChunkPass],
        out: torch.Tensor,
    ) -> None:
        """Writes the passes' rows of `out` [num_rows, num_features], before the norm, and their blocks of `state`.

        `convolved` [num_rows, num_channels] float32: the convolution's results.
        """
        for each in passes:
            decays, betas = (None if x is None else x[each.rows] for x in (inputs.decays, inputs.betas))
            own = StateInputs(convolved[each.rows].to(inputs.convolved.dtype), decays, betas)
            initial = state.index_select(0, each.blocks).view(-1, *self._scan.state_shape)
            lens = {"cu_seqlens": each.cu_seqlens, "cu_seqlens_cpu": each.host_cu_seqlens}
            options = {"initial_state": initial, "output_final_state": True, **lens}
            found, final = self._scan(own, options)
            out[each.rows] = found[0].flatten(1).to(out.dtype)
            final = final.view(-1, *state.shape[1:])
            state.index_copy_(0, each.blocks, final)
            if len(each.keeps):
                state.index_copy_(0, each.keeps, final.index_select(0, each.kept))


def _by_head(x: torch.Tensor, width: int) -> torch.Tensor:
    """Maps [num_rows, num_heads * width] to [1, num_rows, num_heads, width]."""
    return torch.unflatten(x, 1, (-1, width))[None]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous().clone()
