"""Products of quantized weights with torch-npu's operators: int8 weights and activations, or weights of 8 or 4 bits
and float activations.

The operators' descriptions limit shapes and groups; weights outside these limits are dequantized. No operation waits
for the device while a step runs.
"""

from __future__ import annotations

import torch

from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.weights.quantized_weight import CodedWeight, Int8Weight

MOST_FEATURES = 65535
GROUP_MULTIPLE = 32  # inputs in a group
WORD_CODES = 8  # 4-bit codes of adjacent outputs in one word


def linear_of(weight: LinearWeight) -> Linear | None:
    """Returns a layer that multiplies by the weight's codes; None if there are no codes, or the operators do not
    support them.
    """
    if isinstance(weight, Int8Weight) and max(weight.codes.shape) <= MOST_FEATURES:
        return NpuInt8Linear(weight)
    if isinstance(weight, CodedWeight) and takes(weight):
        return NpuQuantizedLinear(weight)
    return None


def takes(weight: CodedWeight) -> bool:
    """Whether npu_weight_quant_batchmatmul supports the weight's shape and groups."""
    num_inputs, num_groups = weight.codes.shape[-1], weight.scales.shape[-1]
    whole_groups = num_groups == 1 or (num_inputs // num_groups) % GROUP_MULTIPLE == 0
    return not weight.codes.dtype.is_floating_point and max(weight.codes.shape[-2:]) <= MOST_FEATURES and whole_groups


class NpuInt8Linear:
    """Multiplies x and the weight as int8. x gets one scale per row, or the scale and zero point stored in the file."""

    def __init__(self, weight: Int8Weight) -> None:
        self._codes = weight.codes.transpose(0, 1).contiguous()  # [in_features, out_features]
        self._dtype, self._bias = weight.dtype, weight.bias
        self._inputs = weight.inputs is not None
        self._scales = weight.scales.to(torch.float32)
        self._whole: torch.Tensor | None = None
        if weight.inputs is None:
            return
        step, zero = (each.to(torch.float32) for each in weight.inputs)
        num_inputs = len(self._codes)
        self._inverse = (1 / step).expand(num_inputs).contiguous()
        self._zeros = zero.expand(num_inputs).contiguous()
        sums = weight.codes.sum(-1, dtype=torch.int64)
        self._whole = (-sums * zero.to(torch.int64)).to(torch.int32)  # what the zero point adds to each output
        self._scales = self._scales * step
        if weight.dtype == torch.float16:  # the operator has a special form of scales for float16 results
            self._scales = torch.ops.npu.npu_trans_quant_param(self._scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._inputs:
            codes, steps = (
                torch.ops.npu.npu_quantize(rows.float(), self._inverse, self._zeros, torch.qint8, -1, False),
                None,
            )
        else:
            codes, steps = torch.ops.npu.npu_dynamic_quant(rows)
        out: torch.Tensor = torch.ops.npu.npu_quant_matmul(
            codes, self._codes, self._scales, pertoken_scale=steps, bias=self._whole, output_dtype=self._dtype
        )
        if self._bias is not None:
            out = out + self._bias
        return out.reshape(*x.shape[:-1], -1)


class NpuQuantizedLinear:
    """Multiplies x, not quantized, by a weight of 8 or 4 bits in the operator's form: (code + offset) * scale."""

    def __init__(self, weight: CodedWeight) -> None:
        codes, offsets, has_four = signed(weight)
        num_outputs, num_inputs = codes.shape
        self._codes = codes.transpose(0, 1).contiguous()  # [in_features, out_features]
        if has_four and num_outputs % WORD_CODES == 0:
            self._codes = torch.ops.npu.npu_convert_weight_to_int4pack(self._codes.to(torch.int32))
        self._scales = weight.scales.transpose(0, 1).to(weight.dtype).contiguous()  # [num_groups, out_features]
        self._offsets = None if offsets is None else offsets.transpose(0, 1).to(weight.dtype).contiguous()
        num_groups = len(self._scales)
        self._group_size = num_inputs // num_groups if num_groups > 1 else 0
        # The operator adds float32 biases to bfloat16 products.
        wide = weight.dtype == torch.bfloat16 and weight.bias is not None
        self._bias = weight.bias.float() if wide and weight.bias is not None else weight.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            rows,
            self._codes,
            self._scales,
            antiquant_offset=self._offsets,
            bias=self._bias,
            antiquant_group_size=self._group_size,
        )
        return out.reshape(*x.shape[:-1], -1)


def signed(weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Returns codes as int8, the offset added to them (None: no offset), and whether every code fits four bits."""
    least, most = (int(each) for each in weight.codes.aminmax())
    shift = 8 if least >= 0 and most <= 15 else 128 if most > 127 else 0
    codes = (weight.codes.to(torch.int16) - shift).to(torch.int8)
    offsets = shift - weight.zeros
    has_four = least - shift >= -8 and most - shift <= 7
    return codes, offsets if bool(offsets.any()) else None, has_four
