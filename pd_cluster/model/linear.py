"""Linear layers with their weight in oneDNN's own order, which is faster on CPU.

The rule is fixed, never measured: float32 on x86-64 with oneDNN is packed, anything else stays plain. So the same
checkpoint computes the same numbers in every process; and where it is packed, a row's do not depend on how many rows
are computed with it, as MKL's do.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear, pad

Linear = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, in_features] to [num_rows, out_features]

MOST_PADDED = 16 << 20  # multiplications for padding, of one product: less than oneDNN needs to compile for other rows
SIZES_PER_OCTAVE = 8
LEAST_ROWS = 4
MOST_INPUTS_OF_ONE_ROW = 1024  # up to here one row has the same bits alone; tests/model/test_linear.py holds it


class PackedLinear:
    """`x @ weight.T + bias` with a weight that only oneDNN can read; nothing keeps the plain one.

    oneDNN compiles anew for every number of rows, a millisecond each, and keeps about a thousand results. So rows are
    padded to a number that comes often. Fewer than four rows of a wide input become four: for one alone, oneDNN adds in
    another order from 1,025 inputs on (AVX-512), and four take no longer than one, while two and three do.
    """

    __slots__ = ("_bias", "_most_padding", "_run", "_weight", "least_rows")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self.least_rows = LEAST_ROWS if weight.shape[1] > MOST_INPUTS_OF_ONE_ROW else 1
        self._most_padding = MOST_PADDED // max(1, weight.numel())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[-2]
        if num_rows < self.least_rows:
            padding = self.least_rows - num_rows if num_rows else 0
        else:
            padding = padded(num_rows, self._most_padding) - num_rows
        if padding:
            x = pad(x, (0, 0, 0, padding))
        result: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return result[..., :num_rows, :] if padding else result


class PlainLinear:
    """The same with the weight as it is."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.detach()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


def packs(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and platform.machine() == "x86_64"
        and weight.numel() > 0
    )


def padded(num_rows: int, most: int) -> int:
    """The next of eight sizes an octave, which are `most` apart at most: a small product in vain is cheap."""
    step = min(num_rows // SIZES_PER_OCTAVE, most)
    step = 1 << step.bit_length() - 1 if step > 1 else 1
    return -(-num_rows // step) * step


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """weight [out_features, in_features], bias [out_features]; the caller drops its own reference to the weight."""
    return PackedLinear(weight, bias) if packs(weight) else PlainLinear(weight, bias)


def join(parts: Sequence[torch.nn.Linear]) -> Linear:
    """One layer whose output is the concatenation of theirs. A missing bias among others is zero."""
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        return make_linear(weight)
    filled = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    return make_linear(weight, torch.cat(filled))
