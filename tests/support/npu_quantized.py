"""Implements torch-npu's operators for quantized weights in plain torch; npu_simulated.py registers and checks them.

They follow CANN's documentation, independently of the code under test. As on the device, only these functions know the
order of codes in a packed word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DTYPES = {1: torch.int8, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}  # c10's codes of dtypes
QINT8 = 12
ORDER = (3, 0, 6, 1, 7, 2, 5, 4)  # of the eight codes in a word
FEATURES = 65535


def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert smooth_scales is None
    assert group_index is None
    assert (dst_type, quant_mode, dst_type_max) in ((None, "pertoken", 0.0), (1, "pertoken", 0.0))
    assert input.is_contiguous()
    wide = input.float()
    scales = wide.abs().amax(-1) / 127
    codes = (wide / scales.clamp(min=1e-30).unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
    return codes, scales


def quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    assert dtype == QINT8
    assert axis == -1
    assert not div_mode
    assert zero_points is not None
    assert input.dtype == scales.dtype == zero_points.dtype
    assert scales.shape == zero_points.shape
    assert scales.shape in ((1,), input.shape[-1:])
    return (input * scales + zero_points).round().clamp(-128, 127).to(torch.int8)


def trans_quant_param(
    scale: torch.Tensor, offset: torch.Tensor | None = None, round_mode: int | None = 0
) -> torch.Tensor:
    assert scale.dtype == torch.float32
    assert offset is None
    return (scale.view(torch.int32).to(torch.int64) & 0xFFFFE000) | 1 << 46


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    **others: object,
) -> torch.Tensor:
    assert not any(each is not None for each in others.values())
    assert x1.dtype == x2.dtype == torch.int8
    assert max(x1.shape[-1], *x2.shape) <= FEATURES
    dtype = DTYPES[1 if output_dtype is None else output_dtype]
    if dtype == torch.float16 and pertoken_scale is None:  # only this form of the operator returns float16
        assert scale.dtype == torch.int64
    else:
        assert scale.dtype in (torch.float32, torch.bfloat16)
    if scale.dtype == torch.int64:
        scale = (scale & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    sums = torch._int_mm(x1, x2) if len(x1) else x1.new_empty((0, x2.shape[1]), dtype=torch.int32)
    if bias is not None:
        assert bias.dtype == torch.int32
        assert bias.shape == x2.shape[1:]
        sums = sums + bias
    out = sums.to(torch.float32) * scale.float()
    if pertoken_scale is not None:
        assert pertoken_scale.dtype == torch.float32
        assert pertoken_scale.shape == x1.shape[:1]
        out = out * pertoken_scale.unsqueeze(-1)
    return out.to(dtype)


def convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    assert inner_k_tiles == 0
    assert weight.dtype == torch.int32
    assert weight.is_contiguous()
    assert weight.shape[1] % 8 == 0
    assert int(weight.min()) >= -8
    assert int(weight.max()) <= 7
    fields = (weight & 15).view(len(weight), -1, 8).long()[..., list(ORDER)]
    words = (fields << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    fields = (words.unsqueeze(-1).long() >> torch.arange(0, 32, 4)) & 15
    restored = torch.empty_like(fields)
    restored[..., list(ORDER)] = fields
    codes = restored.flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)


def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    assert quant_scale is None
    assert quant_offset is None
    assert weight_dtype is None
    assert weight.is_contiguous()
    codes = unpacked(weight) if weight.dtype == torch.int32 else weight
    assert weight.dtype in (torch.int32, torch.int8)
    num_inputs, num_outputs = codes.shape
    assert max(num_inputs, num_outputs) <= FEATURES
    assert antiquant_scale.dtype == x.dtype
    if antiquant_group_size:
        assert antiquant_group_size % 32 == 0
        assert 32 <= antiquant_group_size < num_inputs
        num_groups = -(-num_inputs // antiquant_group_size)
    else:
        num_groups = 1
    assert antiquant_scale.shape == (num_groups, num_outputs)
    values = codes.float().view(num_groups, -1, num_outputs)
    if antiquant_offset is not None:
        assert antiquant_offset.dtype == x.dtype
        assert antiquant_offset.shape == antiquant_scale.shape
        values = values + antiquant_offset.float().unsqueeze(1)
    numbers = (values * antiquant_scale.float().unsqueeze(1)).view(num_inputs, num_outputs)
    out = x.float() @ numbers
    if bias is not None:
        assert bias.dtype == (torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
        out = out + bias.float()
    return out.to(x.dtype)


def coded_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    antiquant_scale: torch.Tensor | None,
    antiquant_offset: torch.Tensor | None,
    per_token_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns one group's rows of npu_grouped_matmul with quantized weights."""
    if per_token_scale is not None:
        assert scale is not None
        assert x.dtype == weight.dtype == torch.int8
        assert scale.dtype in (torch.float32, torch.bfloat16)
        sums = (x.double() @ weight.double()).to(torch.float32)
        return (sums * scale.float() * per_token_scale.unsqueeze(-1)).to(dtype)
    assert antiquant_scale is not None
    assert weight.dtype == torch.int8
    assert antiquant_scale.dtype == x.dtype
    num_inputs, num_outputs = weight.shape
    values = weight.float().view(len(antiquant_scale), -1, num_outputs)
    if antiquant_offset is not None:
        assert antiquant_offset.dtype == x.dtype
        values = values + antiquant_offset.float().unsqueeze(1)
    numbers = (values * antiquant_scale.float().unsqueeze(1)).view(num_inputs, num_outputs)
    return (x.float() @ numbers).to(dtype)


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu_dynamic_quant": dynamic_quant,
    "npu_quantize": quantize,
    "npu_trans_quant_param": trans_quant_param,
    "npu_quant_matmul": quant_matmul,
    "npu_convert_weight_to_int4pack": convert_weight_to_int4pack,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
}
WITHOUT_META = ("npu_convert_weight_to_int4pack",)
