"""The planes of a state, read from the module of a recurrent layer: everything that the layer keeps per sequence.

A recurrent state is one plane. The last inputs of a convolution form one plane for each part that is split over ranks
separately. Does not use pools, and reads configs only through modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.states.state_heads import CHANNELS
from pd_cluster.wire import Plane

Recurrence = Literal["gated_delta", "kimi_delta", "mamba2", "short_conv"]
STATE_PLANE = "state"


class ConvPart(NamedTuple):
    """Consecutive channels of a convolution that belong to `num_heads` heads, head after head.

    `name`: the name of the part's plane.
    """

    name: str
    num_heads: int
    channels: int  # channels per head

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.channels


class Recurrent(NamedTuple):
    """The matrices of a state, [num_heads, num_rows, num_columns], as transformers' modules arrange them."""

    num_heads: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class StateParts:
    """The state that one layer keeps per sequence on this rank.

    Each part of the convolution has a plane in the pool. For each head of the part, the plane holds the last
    kernel_size - 1 inputs [kernel_size - 1, channels], oldest first. transformers keeps one more input, which is never
    read.
    """

    recurrence: Recurrence
    kernel_size: int  # the convolution's
    convolved: tuple[ConvPart, ...]  # in the order of the convolution's channels
    recurrent: Recurrent | None = None  # None: the layer is only a convolution

    @property
    def num_kept(self) -> int:
        """Returns how many inputs of the convolution are kept."""
        return self.kernel_size - 1

    @property
    def num_channels(self) -> int:
        """Returns the number of the convolution's channels."""
        return sum(part.num_channels for part in self.convolved)

    @property
    def num_heads(self) -> int:
        """Returns the number of heads of the plane that has the most."""
        own = 0 if self.recurrent is None else self.recurrent.num_heads
        return max(own, *(part.num_heads for part in self.convolved))

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Returns the layer's planes in the pool: the recurrent state first, then the parts of the convolution."""
        most, found = self.num_heads, list[Plane]()
        if self.recurrent is not None:
            heads, rows, columns = self.recurrent
            found.append(Plane(STATE_PLANE, rows * columns, 0 if heads == most else heads))
        for name, heads, channels in self.convolved:
            found.append(Plane(name, self.num_kept * channels, 0 if heads == most else heads))
        return tuple(found)


def convolution_of(module: torch.nn.Module) -> torch.nn.Conv1d:
    """Returns a recurrent module's convolution over time, whose `weight` is [num_channels, 1, kernel_size]."""
    (found,) = [each for each in module.children() if isinstance(each, torch.nn.Conv1d)]
    return found


def _gated_delta(module: Any) -> StateParts:
    keys, values = module.num_k_heads, module.num_v_heads
    convolved = (
        ConvPart("conv_q", keys, module.head_k_dim),
        ConvPart("conv_k", keys, module.head_k_dim),
        ConvPart("conv_v", values, module.head_v_dim),
    )
    return _parts("gated_delta", module, convolved, Recurrent(values, module.head_k_dim, module.head_v_dim))


def _kimi_delta(module: Any) -> StateParts:
    heads, width = module.num_heads, module.head_dim
    convolved = tuple(ConvPart(name, heads, width) for name in ("conv_q", "conv_k", "conv_v"))
    return _parts("kimi_delta", module, convolved, Recurrent(heads, width, width))


def _mamba2(module: Any) -> StateParts:
    heads, width, size = module.num_heads, module.head_dim, module.ssm_state_size
    convolved = (
        ConvPart("conv_x", heads, width),
        ConvPart("conv_b", module.n_groups, size),
        ConvPart("conv_c", module.n_groups, size),
    )
    return _parts("mamba2", module, convolved, Recurrent(heads, width, size))


def _short_conv(module: Any) -> StateParts:
    num_channels = convolution_of(module).out_channels
    channels = CHANNELS if num_channels % CHANNELS == 0 else num_channels
    return _parts("short_conv", module, (ConvPart("conv", num_channels // channels, channels),), None)


def _parts(
    recurrence: Recurrence, module: torch.nn.Module, convolved: tuple[ConvPart, ...], recurrent: Recurrent | None
) -> StateParts:
    convolution = convolution_of(module)
    (kernel_size,) = convolution.kernel_size
    found = StateParts(recurrence, kernel_size, convolved, recurrent)
    if found.num_channels != convolution.out_channels:
        raise ModelError(
            f"{type(module).__name__}: the convolution has {convolution.out_channels} channels, but its parts have "
            f"{found.num_channels}; this model cannot be served"
        )
    return found


# class in transformers -> the function that describes its state
MODULES: Mapping[str, Callable[[Any], StateParts]] = {
    "Qwen3NextGatedDeltaNet": _gated_delta,
    "Qwen3_5GatedDeltaNet": _gated_delta,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "OlmoHybridGatedDeltaNet": _gated_delta,
    "KimiLinearDeltaAttention": _kimi_delta,
    "BailingHybridDeltaAttention": _kimi_delta,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "Lfm2ShortConv": _short_conv,
    "Lfm2MoeShortConv": _short_conv,
}


def state_modules(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Returns a model's recurrent modules by layer index, in order."""
    found: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if type(module).__name__ in MODULES:
            layer_idx = module.layer_idx
            assert isinstance(layer_idx, int)
            found[layer_idx] = module
    return dict(sorted(found.items()))


def parts_of(module: torch.nn.Module) -> StateParts:
    """Returns the state parts of a module from `state_modules`. Raises ModelError if their channels do not add up."""
    return MODULES[type(module).__name__](module)
