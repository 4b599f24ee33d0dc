"""Layers in msmodelslim's formats: its description names each layer's type; signs are as in the NPU operators."""

from __future__ import annotations

import torch

from pd_cluster.checkpoints.quantization_config import Quantization
from pd_cluster.model.weights.bit_unpacking import fields, nibbles
from pd_cluster.model.weights.layer_tensors import LayerTensors, Parts, grouped, inputs_of, runs


def _ascend_w8a8(layer: LayerTensors, found: Quantization) -> Parts:
    """`quant_bias` is the bias in units of `deq_scale`, minus the product of the zero point and the codes' sum."""
    codes, inputs = layer.take("weight"), inputs_of(layer, layer.take("input_scale"), layer.take("input_offset"))
    step, zero = inputs.unbind()
    scales, whole = layer.take("deq_scale"), layer.take("quant_bias")
    if scales.dtype == torch.int64:  # the low 32 bits are a float32
        scales = (scales & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    scales = layer.finite("deq_scale", scales.to(torch.float32))
    layer.get("weight_scale"), layer.get("weight_offset")  # deq_scale already contains both
    sums = codes.sum(-1, dtype=torch.int64)
    bias = (whole.to(torch.int64) + sums * int(zero)).to(torch.float32) * scales
    return {"int8_codes": codes, "int8_scales": scales / step, "int8_inputs": inputs, "bias": bias}


def _ascend_dynamic(layer: LayerTensors, found: Quantization) -> Parts:
    codes, scales, offset = layer.take("weight"), layer.scales("weight_scale"), layer.get("weight_offset")
    if offset is not None and offset.any():
        raise layer.wrong("a weight_offset that is not 0")
    return {"int8_codes": codes, "int8_scales": scales.reshape(-1)}


def _ascend_w8a16(layer: LayerTensors, found: Quantization) -> Parts:
    """NPU operators add the offset, so a weight is (code + offset) * scale."""
    codes, scales = layer.take("weight"), layer.scales("weight_scale")
    offset = layer.get("weight_offset")
    scales = scales.reshape(codes.shape[0], -1)
    zeros = (
        torch.zeros_like(scales)
        if offset is None
        else -layer.finite("weight_offset", offset.float()).reshape_as(scales)
    )
    return grouped(layer, codes, scales, zeros, runs(layer, codes.shape[1], scales.shape[1]))


def _ascend_w4a16(layer: LayerTensors, found: Quantization) -> Parts:
    """Like W8A16, but with signed codes: one or two of them in a byte, or eight in an int32, lowest bits first."""
    stored, scales = layer.take("weight"), layer.scales("weight_scale")
    offset = layer.get("weight_offset")
    if scales.shape[0] != stored.shape[0]:
        raise layer.wrong(f"weight of {stored.shape[0]} rows, scales of {scales.shape[0]}: outputs packed in pairs")
    scales = scales.reshape(stored.shape[0], -1)
    codes = _signed_four(stored, scales.shape[1] * found.group_size if found.group_size > 0 else 0)
    if codes is None:
        raise layer.wrong(f"weight of {stored.dtype} {list(stored.shape)} for {scales.shape[1]} groups of scales")
    zeros = (
        torch.zeros_like(scales)
        if offset is None
        else -layer.finite("weight_offset", offset.float()).reshape_as(scales)
    )
    return grouped(layer, codes, scales, zeros, runs(layer, codes.shape[1], scales.shape[1]))


def _signed_four(stored: torch.Tensor, num_inputs: int) -> torch.Tensor | None:
    """Returns codes from -8 to 7, [N, K] int8; None if neither layout fits. `num_inputs`: K, or 0 if unknown."""
    if stored.dtype == torch.int32:
        found = fields(stored, 4)
    elif stored.dtype not in (torch.int8, torch.uint8):
        return None
    elif num_inputs == stored.shape[1] or (not num_inputs and int(stored.min()) >= -8 and int(stored.max()) <= 7):
        return stored.to(torch.int8)
    else:
        found = nibbles(stored.view(torch.uint8))
    if num_inputs not in (0, found.shape[1]):
        return None
    found = found.to(torch.int8)
    return torch.where(found > 7, found - 16, found)


READERS = {
    "W8A8": _ascend_w8a8,
    "W8A8_DYNAMIC": _ascend_dynamic,
    "W8A16": _ascend_w8a16,
    "W4A16": _ascend_w4a16,
}
