"""Linear layers with their weight in oneDNN's own order, which is faster on CPU at every number of rows.

The rule is fixed, never measured: float32 on x86-64 with oneDNN is packed, anything else stays plain. So the same
checkpoint computes the same numbers in every process.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

Linear = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, in_features] to [num_rows, out_features]


class PackedLinear:
    """`x @ weight.T + bias` with a weight that only oneDNN can read; nothing keeps the plain one."""

    __slots__ = ("_bias", "_run", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return result


class PlainLinear:
    """The same with the weight as it is."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.detach()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


def can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and platform.machine() == "x86_64"
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """weight [out_features, in_features], bias [out_features]; the caller drops its own reference to the weight."""
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def join(parts: Sequence[torch.nn.Linear]) -> Linear:
    """One layer whose output is the concatenation of theirs. A missing bias among others is zero."""
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        return make_linear(weight)
    filled = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    return make_linear(weight, torch.cat(filled))
