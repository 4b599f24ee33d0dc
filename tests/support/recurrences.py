"""A reference for recurrent layers: computes token by token in torch, in the dtype of the inputs.

Also makes layers of several shapes, random outputs of their projections for a step's rows, and pools of states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import silu, softplus

from pd_cluster.native import build
from pd_cluster.native.recurrence_values import ConvHeads, Convolution, GatedDelta, GatedNorm, Mamba2, StateInputs
from pd_cluster.native.state_kernels import StateKernel

EPS = 1e-6


@dataclass(frozen=True)
class RecurrentCase:
    """A layer, and its projections' outputs for one sequence's rows."""

    convolution: Convolution
    recurrence: GatedDelta | Mamba2 | None
    inputs: StateInputs

    @property
    def plane_numels(self) -> list[int]:
        """Returns the number of elements of each plane in a block."""
        kept = [
            part.num_heads * part.channels * (self.convolution.weight.shape[1] - 1) for part in self.convolution.parts
        ]
        return kept if self.recurrence is None else [state_numel(self.recurrence), *kept]

    def rows(self, rows: slice) -> RecurrentCase:
        return replace(self, inputs=StateInputs(*(None if each is None else each[rows] for each in self.inputs)))


def state_numel(recurrence: GatedDelta | Mamba2) -> int:
    if isinstance(recurrence, Mamba2):
        return recurrence.num_heads * recurrence.head_width * recurrence.state_size
    return recurrence.num_heads * recurrence.key_width * recurrence.value_width


def packed_rows(num_rows: int, *widths: int) -> list[torch.Tensor]:
    """Returns random outputs of one projection, split into parts of these widths."""
    return list(torch.randn(num_rows, sum(widths)).split(list(widths), dim=1))


def delta_case(
    num_heads: int,
    num_key_heads: int,
    widths: tuple[int, int],
    num_rows: int,
    by_channel: bool = False,
    kernel: int = 4,
) -> RecurrentCase:
    """`widths`: those of a key and a value."""
    key_width, value_width = widths
    parts = (ConvHeads(num_key_heads, key_width),) * 2 + (ConvHeads(num_heads, value_width),)
    num_channels, num_features = 2 * num_key_heads * key_width + num_heads * value_width, num_heads * value_width
    num_decays = num_heads * (key_width if by_channel else 1)
    norm = GatedNorm("sigmoid after" if by_channel else "silu after", torch.rand(value_width) + 0.5, EPS)
    delta = GatedDelta(
        num_heads, num_key_heads, key_width, value_width, torch.randn(num_decays), torch.rand(num_heads) + 0.05, norm
    )
    convolved, gate, decays, betas = packed_rows(num_rows, num_channels, num_features, num_decays, num_heads)
    convolution = Convolution(torch.randn(num_channels, kernel) * 0.5, None, parts, True)
    return RecurrentCase(convolution, delta, StateInputs(convolved, decays, betas, gate))


def mamba_case(
    num_heads: int,
    num_groups: int,
    widths: tuple[int, int],
    num_rows: int,
    gated: str = "silu before",
    limits: tuple[float, float] = (0.0, float("inf")),
    kernel: int = 4,
) -> RecurrentCase:
    """`widths`: those of a head's x, and of B and C."""
    head_width, size = widths
    parts = (ConvHeads(num_heads, head_width), ConvHeads(num_groups, size), ConvHeads(num_groups, size))
    num_features = num_heads * head_width
    num_channels = num_features + 2 * num_groups * size
    weight = None if gated == "silu after" else torch.rand(num_features) + 0.5
    norm = GatedNorm("silu after" if gated == "silu after" else "silu before", weight, EPS)
    mamba = Mamba2(
        num_heads, num_groups, head_width, size, torch.randn(num_heads), torch.rand(num_heads) * 4 + 0.05,
        torch.randn(num_heads), limits, norm,
    )  # fmt: skip
    gate, convolved, steps = packed_rows(num_rows, num_features, num_channels, num_heads)
    convolution = Convolution(torch.randn(num_channels, kernel) * 0.5, torch.randn(num_channels), parts, True)
    return RecurrentCase(convolution, mamba, StateInputs(convolved, steps, None, gate))


def conv_case(num_channels: int, num_rows: int, kernel: int = 3) -> RecurrentCase:
    convolution = Convolution(torch.randn(num_channels, kernel), None, (ConvHeads(num_channels // 16, 16),), False)
    return RecurrentCase(convolution, None, StateInputs(torch.randn(num_rows, num_channels)))


class BlocksOfStates:
    """A pool of one layer's states; a block holds NaN until it is cleared."""

    def __init__(self, case: RecurrentCase, num_blocks: int) -> None:
        ends = np.cumsum([0, *case.plane_numels]).tolist()
        self.data = torch.full((num_blocks, ends[-1]), torch.nan)
        self.planes = [self.data[:, start:stop] for start, stop in itertools.pairwise(ends)]


def table_of(*segments: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(segments, dtype=np.int32).reshape(-1, 4)


def reference(case: RecurrentCase, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Computes the rows of one sequence without a past."""
    convolved = convolve(case.convolution, case.inputs.convolved.to(dtype))
    decays, betas, gate = (None if each is None else each.to(dtype) for each in case.inputs[1:])
    if case.recurrence is None:
        return convolved
    assert decays is not None
    assert gate is not None
    if isinstance(case.recurrence, Mamba2):
        return _norm_groups(case.recurrence, _mamba(case.recurrence, convolved, decays), gate)
    assert betas is not None
    found = _delta(case.recurrence, convolved, decays, betas)  # [num_rows, num_heads, value_width]
    norm = case.recurrence.norm
    assert norm.weight is not None
    normed = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.to(dtype)
    gates = gate.sigmoid() if norm.gate == "sigmoid after" else silu(gate)
    return normed.flatten(1) * gates


def convolve(convolution: Convolution, x: torch.Tensor) -> torch.Tensor:
    weight = convolution.weight.to(x.dtype)
    num_channels, kernel = weight.shape
    padded = torch.cat((x.new_zeros(kernel - 1, num_channels), x))
    out = x.new_zeros(x.shape) if convolution.bias is None else convolution.bias.to(x.dtype).expand(x.shape).clone()
    for j in range(kernel):
        out += weight[:, j] * padded[j : j + len(x)]
    return silu(out) if convolution.has_silu else out


def _delta(delta: GatedDelta, qkv: torch.Tensor, decays: torch.Tensor, betas: torch.Tensor) -> torch.Tensor:
    num_rows, dtype, keys = len(qkv), qkv.dtype, delta.num_key_heads * delta.key_width
    q, k, v = qkv.split([keys, keys, delta.num_heads * delta.value_width], dim=1)
    share = delta.num_heads // delta.num_key_heads
    q, k = (
        each.view(num_rows, delta.num_key_heads, -1).repeat_interleave(share, dim=1) for each in (q, k)
    )  # [num_rows, num_heads, key_width]
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q, v = q * delta.key_width**-0.5, v.view(num_rows, delta.num_heads, -1)
    steps = softplus(decays + delta.decay_bias.to(dtype)).view(num_rows, delta.num_heads, -1)
    decay = torch.exp(-delta.rates.to(dtype)[:, None] * steps)  # [num_rows, num_heads, key_width or 1]
    state, out = qkv.new_zeros(delta.num_heads, delta.key_width, delta.value_width), torch.empty_like(v)
    for t in range(num_rows):
        state = state * decay[t, :, :, None]
        found = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t, :, :, None] * ((v[t] - found) * betas[t].sigmoid()[:, None])[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out


def _mamba(mamba: Mamba2, xbc: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    num_rows, dtype, size = len(xbc), xbc.dtype, mamba.state_size
    inner, groups = mamba.num_heads * mamba.head_width, mamba.num_groups * size
    x, b, c = xbc.split([inner, groups, groups], dim=1)
    share = mamba.num_heads // mamba.num_groups
    b, c = (each.view(num_rows, mamba.num_groups, size).repeat_interleave(share, dim=1) for each in (b, c))
    x = x.view(num_rows, mamba.num_heads, mamba.head_width)
    steps = softplus(steps + mamba.step_bias.to(dtype)).clamp(*mamba.step_limits)  # [num_rows, num_heads]
    decay = torch.exp(-steps * mamba.rates.to(dtype))
    state, out = xbc.new_zeros(mamba.num_heads, mamba.head_width, size), torch.empty_like(x)
    for t in range(num_rows):
        state = state * decay[t, :, None, None] + (steps[t, :, None] * x[t])[:, :, None] * b[t, :, None]
        out[t] = torch.einsum("hpn,hn->hp", state, c[t]) + mamba.skips.to(dtype)[:, None] * x[t]
    return out.flatten(1)


def _norm_groups(mamba: Mamba2, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    norm = mamba.norm
    if norm.gate == "silu before":
        x = x * silu(gate)
    if norm.weight is not None:
        groups = x.view(len(x), mamba.num_groups, -1)
        x = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)).flatten(1)
        x = x * norm.weight.to(x.dtype)
    return x * silu(gate) if norm.gate == "silu after" else x


def kernel_of(case: RecurrentCase, *flags: str) -> StateKernel:
    return StateKernel(case.convolution, case.recurrence, (*build.FLAGS, *flags))
