"""Weights as codes with scales: the forms into which every format of quantized weights is converted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.linear_weight import Tensors, WeightForm, WeightPart
from pd_cluster.model.layers.packed_linear import Linear, PlainLinear, make_linear
from pd_cluster.model.weights.int8_linear import Int8GroupLinear, Int8Linear
from pd_cluster.native.packed_products import (
    CodeGrid,
    fp8_weight_only_linear,
    int4_linear,
    int8_linear,
    int8_weight_only_linear,
)

LEAST_IN_GROUP = 16  # inputs; codes in smaller groups are dequantized before products


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Weights (code - zero) * scale; activations stay floats.

    codes [..., N, K], integers or eight-bit floats; scales, zeros [..., N, G] float32, for groups of K / G inputs; bias
    [..., N] or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> CodedWeight:
        return cls(parts["codes"], parts["code_scales"], parts["code_zeros"], _bias(parts, dtype), dtype)

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @classmethod
    def join(cls, parts: Sequence[CodedWeight]) -> CodedWeight:
        """Joins weights; all groups become as small as the smallest."""
        if len(parts) == 1:
            return parts[0]
        if len({part.codes.dtype for part in parts}) > 1:
            raise ModelError("layers that are fused into one have both integers and floats as codes")
        num_groups = math.lcm(*(part.scales.shape[-1] for part in parts))
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([_finer(part.scales, num_groups) for part in parts]),
            torch.cat([_finer(part.zeros, num_groups) for part in parts]),
            _joined_bias([part.bias for part in parts], [part.out_features for part in parts]),
            parts[0].dtype,
        )

    def reordered(self, rows: torch.Tensor) -> CodedWeight:
        rows = rows.to(self.codes.device)
        return replace(
            self,
            codes=_rows(self.codes, rows),
            scales=self.scales.index_select(-2, rows),
            zeros=self.zeros.index_select(-2, rows),
            bias=None if self.bias is None else self.bias.index_select(-1, rows),
        )

    def linear(self) -> Linear:
        """Returns a layer that multiplies by codes if the CPU has kernels for them; otherwise by the dequantized
        weight.

        With a bfloat16 model, activations are rounded to bfloat16, as with plain weights. On CUDA,
        model/kernels/cuda/linear/quantized_linear.py makes the layers.
        """
        found = None
        if self.codes.device.type == "cpu" and self.dtype == torch.float32:
            found = self._of_codes("float32")
        elif self.codes.device.type == "cpu" and self.dtype == torch.bfloat16:
            found = self._of_codes("bfloat16")
        return found or make_linear(self.matrix(), self.bias)

    def _of_codes(self, activations: Literal["float32", "bfloat16"]) -> Linear | None:
        if self.codes.shape[-1] < LEAST_IN_GROUP * self.scales.shape[-1]:  # scales would take more bytes than codes
            return None
        if self.codes.dtype.is_floating_point:
            return fp8_weight_only_linear(self.codes, self.scales, self.bias, activations=activations)
        zeros = self.zeros if self.zeros.any() else None
        least, most = (int(each) for each in self.codes.aminmax())
        if (least >= -8 and most <= 7) or (zeros is not None and least >= 0 and most <= 15):
            return int4_linear(self.codes, CodeGrid(self.scales, zeros), self.bias, activations=activations)
        return int8_weight_only_linear(self.codes, CodeGrid(self.scales, zeros), self.bias, activations=activations)

    def reference(self) -> Linear:
        return PlainLinear(self.matrix(), self.bias)

    def matrix(self) -> torch.Tensor:
        groups = self.codes.to(torch.float32).reshape(*self.scales.shape, -1)
        numbers = (groups - self.zeros.unsqueeze(-1)) * self.scales.unsqueeze(-1)
        return numbers.flatten(-2).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weights for integer products: codes [..., N, K] int8, scales [..., N] float32, bias [..., N] or None.

    Activations are rounded to int8, with one scale per row, or with the scale and zero point in the file (`inputs`,
    [2]).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    inputs: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> Int8Weight:
        inputs = parts.get("int8_inputs")
        return cls(parts["int8_codes"], parts["int8_scales"], _bias(parts, dtype), dtype, inputs)

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @classmethod
    def join(cls, parts: Sequence[Int8Weight]) -> Int8Weight:
        """Joins weights. Raises ModelError if the file has different activation scales for them."""
        first, *others = parts
        for other in others:
            if (first.inputs is None) != (other.inputs is None) or (
                first.inputs is not None and other.inputs is not None and not torch.equal(first.inputs, other.inputs)
            ):
                raise ModelError("layers that are fused into one have different input_scale or input_offset")
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            _joined_bias([part.bias for part in parts], [part.out_features for part in parts]),
            first.dtype,
            first.inputs,
        )

    def reordered(self, rows: torch.Tensor) -> Int8Weight:
        rows = rows.to(self.codes.device)
        return replace(
            self,
            codes=self.codes.index_select(-2, rows),
            scales=self.scales.index_select(-1, rows),
            bias=None if self.bias is None else self.bias.index_select(-1, rows),
        )

    def linear(self) -> Linear:
        if (
            self.codes.device.type != "cpu"
        ):  # for CUDA see model/kernels/cuda/linear/quantized_linear.py; other devices dequantize
            return make_linear(self.matrix(), self.bias)
        found = None
        if self.inputs is None and self.dtype in (torch.float32, torch.bfloat16):
            found = int8_linear(self.codes, self.scales.unsqueeze(1), self.bias)
        return found or Int8Linear(self.codes, self.scales, self.bias, self.inputs)

    def reference(self) -> Linear:
        if self.codes.device.type not in ("cpu", "cuda"):
            return PlainLinear(self.matrix(), self.bias)
        return Int8Linear(self.codes, self.scales, self.bias, self.inputs)

    def matrix(self) -> torch.Tensor:
        return (self.codes.to(torch.float32) * self.scales.unsqueeze(-1)).to(self.dtype)


@dataclass(frozen=True, slots=True)
class W4A8Weight:
    """Weights for integer products: codes [..., N, K] from -8 to 7, scales [..., N, G] float32, bias [..., N] or None.

    Activations are rounded to int8, with one scale per row. Only CPUs have kernels; the loader refuses other devices.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> W4A8Weight:
        return cls(parts["w4a8_codes"], parts["w4a8_scales"], _bias(parts, dtype), dtype)

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @classmethod
    def join(cls, parts: Sequence[W4A8Weight]) -> W4A8Weight:
        """Joins weights; all groups become as small as the smallest."""
        num_groups = math.lcm(*(part.scales.shape[-1] for part in parts))
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([_finer(part.scales, num_groups) for part in parts]),
            _joined_bias([part.bias for part in parts], [part.out_features for part in parts]),
            parts[0].dtype,
        )

    def reordered(self, rows: torch.Tensor) -> W4A8Weight:
        rows = rows.to(self.codes.device)
        return replace(
            self,
            codes=self.codes.index_select(-2, rows),
            scales=self.scales.index_select(-2, rows),
            bias=None if self.bias is None else self.bias.index_select(-1, rows),
        )

    def linear(self) -> Linear:
        found = None
        if self.dtype in (torch.float32, torch.bfloat16):
            found = int4_linear(self.codes, CodeGrid(self.scales), self.bias, activations="int8")
        return found or self.reference()

    def reference(self) -> Linear:
        return Int8GroupLinear(self.codes, self.scales, self.bias)

    def matrix(self) -> torch.Tensor:
        numbers = self.codes.to(torch.float32).reshape(*self.scales.shape, -1) * self.scales.unsqueeze(-1)
        return numbers.flatten(-2).to(self.dtype)


def _bias(parts: Tensors, dtype: torch.dtype) -> torch.Tensor | None:
    bias = parts.get("bias")
    return None if bias is None else bias.to(dtype)


def _joined_bias(biases: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor | None:
    """Joins biases; if only some layers have one, the others get a bias of zeros."""
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    return torch.cat([known.new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True)])


def _finer(groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    return groups.repeat_interleave(num_groups // groups.shape[-1], dim=-1)


def _rows(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if codes.dtype.is_floating_point:  # torch does not support index_select for eight-bit floats
        return codes.view(torch.uint8).index_select(-2, rows).view(codes.dtype)
    return codes.index_select(-2, rows)


BIAS = WeightPart(outputs=0, inputs=None, is_added=True)
CODED = WeightForm(
    {"codes": WeightPart(0, 1), "code_scales": WeightPart(0, 1), "code_zeros": WeightPart(0, 1), "bias": BIAS},
    CodedWeight,
)
INT8 = WeightForm(
    {"int8_codes": WeightPart(0, 1), "int8_scales": WeightPart(0, None), "bias": BIAS},
    Int8Weight,
    rounds_activations=True,
)
W4A8 = WeightForm(
    {"w4a8_codes": WeightPart(0, 1), "w4a8_scales": WeightPart(0, 1), "bias": BIAS}, W4A8Weight, rounds_activations=True
)
INT8_STATIC = WeightForm({**INT8.parts, "int8_inputs": WeightPart(None, None)}, Int8Weight, rounds_activations=True)
