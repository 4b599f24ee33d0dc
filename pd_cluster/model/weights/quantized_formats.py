"""Converts one quantized linear layer, in any known format, to the parts of a form (model/weights/quantized_weight.py).

A layer's tensors determine its format; config.json supplies only what they leave open.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pd_cluster.checkpoints.quantization_config import Quantization
from pd_cluster.model.layers.linear_weight import Tensors
from pd_cluster.model.weights import msmodelslim
from pd_cluster.model.weights.bit_unpacking import WORD_BITS, awq_fields, e2m1_doubled, fields
from pd_cluster.model.weights.layer_tensors import FP8, LayerTensors, Parts, grouped, inputs_of, runs

INT_BITS = (2, 3, 4, 8)
W4A8_BITS = 4
WEIGHTS = ("weight", "qweight", "weight_packed", "blocks")  # names of the tensor with the codes


def decoded(place: str, tensors: Tensors, found: Quantization, ascend_type: str = "") -> Parts:
    """Returns the parts of a form, with the layer's bias. Raises ModelError that names the layer and the tensor."""
    layer = LayerTensors(place, tensors)
    bias = layer.get("bias")
    try:
        parts = _reader(layer, found, ascend_type)(layer, found)
    except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        raise layer.wrong(" ".join(str(error).split())[:200]) from error
    layer.finish()
    if bias is not None:
        if not bias.is_floating_point():
            raise layer.wrong(f"bias of {bias.dtype}")
        parts["bias"] = layer.finite("bias", bias)
    return {name: tensor.contiguous() for name, tensor in parts.items()}


def _reader(
    layer: LayerTensors, found: Quantization, ascend_type: str
) -> Callable[[LayerTensors, Quantization], Parts]:
    if ascend_type:
        return msmodelslim.READERS[ascend_type]
    if "qweight" in layer:
        return _awq if found.method == "awq" else _gptq
    if "weight_packed" in layer:
        return _packed
    if "blocks" in layer:
        return _mxfp4_blocks
    return _eight_bits


def _awq(layer: LayerTensors, found: Quantization) -> Parts:
    words, scales, zeros = layer.take("qweight"), layer.scales("scales"), layer.take("qzeros")
    if words.dtype != torch.int32 or zeros.dtype != torch.int32:
        raise layer.wrong(f"words of {words.dtype}")
    if found.is_by_rows:
        codes = fields(words, 4)
        num_groups = codes.shape[1] // (found.group_size if found.group_size > 0 else codes.shape[1])
        if scales[:, num_groups:].any():
            raise layer.wrong(f"more than {num_groups} groups of scales, with group_size {found.group_size}")
        scales, zeros = scales[:, :num_groups], fields(zeros, 4)[:, :num_groups]  # both were padded to whole words
    else:
        codes, scales, zeros = awq_fields(words).t(), scales.t(), awq_fields(zeros).t()
    if zeros.shape != scales.shape:
        raise layer.wrong(f"qzeros for {list(zeros.shape)} groups, scales for {list(scales.shape)}")
    return grouped(layer, codes.to(torch.int8), scales, zeros, runs(layer, codes.shape[1], scales.shape[1]))


def _gptq(layer: LayerTensors, found: Quantization) -> Parts:
    words, scales, zero_words = layer.take("qweight"), layer.scales("scales"), layer.take("qzeros")
    if words.dtype != torch.int32 or zero_words.dtype != torch.int32 or scales.dim() != 2:
        raise layer.wrong(f"words of {words.dtype} and {zero_words.dtype}, scales of {list(scales.shape)}")
    num_outputs = scales.shape[1]
    bits = zero_words.shape[1] * WORD_BITS // num_outputs
    if bits not in INT_BITS:
        raise layer.wrong(f"qzeros of {zero_words.shape[1]} words for {num_outputs} output features")
    codes = fields(words.t().contiguous(), bits)
    zeros = (fields(zero_words, bits) + found.zero_offset) & ((1 << bits) - 1)
    of = layer.get("g_idx")
    if of is None or not of.any():  # some tools write zeros for the natural order
        of = runs(layer, codes.shape[1], scales.shape[0], found.group_size)
    half = 128 if bits == 8 else 0  # 8-bit codes become int8
    return grouped(layer, (codes - half).to(torch.int8), scales.t(), (zeros - half).t(), of)


def _packed(layer: LayerTensors, found: Quantization) -> Parts:
    packed = layer.take("weight_packed")
    if packed.dtype == torch.uint8:
        layer.get("weight_shape")
        return _small_floats(layer, packed)
    scales = layer.scales("weight_scale")
    num_outputs, num_inputs = (int(each) for each in layer.take("weight_shape"))
    if packed.is_floating_point() or num_inputs < 1:
        raise layer.wrong(f"weight_packed of {packed.dtype}, weight_shape {[num_outputs, num_inputs]}")
    bits = packed.shape[1] * WORD_BITS // num_inputs
    if bits not in INT_BITS:
        raise layer.wrong(f"weight_packed of {packed.shape[1]} words for {num_inputs} input features")
    half = 1 << bits - 1  # stored unsigned
    codes = fields(packed, bits)[:, :num_inputs] - half
    zeros = torch.zeros(num_outputs, scales.shape[1])
    if (words := layer.get("weight_zero_point")) is not None:
        rows = words if words.dtype == torch.int8 else fields(words.t().contiguous(), bits)[:, :num_outputs].t() - half
        zeros = rows.to(torch.float32)
    of = layer.get("weight_g_idx")
    if of is None or int(of.min()) < 0:  # -1: the natural order of inputs
        if found.is_w4a8 and bits == W4A8_BITS:
            return _w4a8(layer, codes.to(torch.int8), scales, zeros)
        of = runs(layer, num_inputs, scales.shape[1], found.group_size)
    elif found.is_w4a8 and bits == W4A8_BITS:
        raise layer.wrong("int8 activations with a weight_g_idx")
    return grouped(layer, codes.to(torch.int8), scales, zeros, of)


def _w4a8(layer: LayerTensors, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Parts:
    """Makes parts from 4-bit codes for int8 activations; scales [N, G]."""
    if zeros is not None and bool(zeros.any()):
        raise layer.wrong("int8 activations with a weight_zero_point that is not 0")
    runs(layer, codes.shape[1], scales.shape[1])
    least, most = (int(code) for code in codes.aminmax())
    if least < -8 or most > 7 or scales.shape[0] != codes.shape[0]:
        raise layer.wrong(
            f"codes from {least} to {most}, {scales.shape[0]} rows of scales for {codes.shape[0]} of codes"
        )
    return {"w4a8_codes": codes, "w4a8_scales": scales}


def _small_floats(layer: LayerTensors, packed: torch.Tensor) -> Parts:
    """Reads nvfp4 (groups of 16, e4m3 scales and a divisor) or mxfp4 (groups of 32, scales are powers of two)."""
    are_exponents, steps = layer.dtype("weight_scale") == torch.uint8, _steps(layer, "weight_scale")
    if "weight_global_scale" in layer:
        steps = layer.finite("weight_scale / weight_global_scale", steps / layer.scales("weight_global_scale"))
    elif not are_exponents:
        steps = steps * layer.scales("weight_scale_2")
    return _of_e2m1(layer, packed, steps)


def _steps(layer: LayerTensors, name: str) -> torch.Tensor:
    """Takes scales, which may be stored as exponents: byte b means 2^(b - 127), and 255 means NaN."""
    if layer.dtype(name) != torch.uint8:
        return layer.scales(name)
    stored = layer.take(name)
    if bool((stored == 255).any()):
        raise layer.wrong(f"{name} has 255, which is NaN")
    return torch.exp2(stored.to(torch.float32) - 127)


def _of_e2m1(layer: LayerTensors, packed: torch.Tensor, steps: torch.Tensor) -> Parts:
    codes = e2m1_doubled(packed)
    of = runs(layer, codes.shape[-1], steps.shape[-1])
    return grouped(layer, codes, steps / 2, torch.zeros_like(steps), of)


def _mxfp4_blocks(layer: LayerTensors, found: Quantization) -> Parts:
    """Reads experts of gpt-oss: blocks [E, N, G, 16] uint8, scales [E, N, G] uint8."""
    return _of_e2m1(layer, layer.take("blocks").flatten(-2), _steps(layer, "scales"))


def _eight_bits(layer: LayerTensors, found: Quantization) -> Parts:
    weight = layer.take("weight")
    if weight.dtype == torch.uint8 and "weight_scale_2" in layer:  # nvfp4 as written by ModelOpt
        return _small_floats(layer, weight)
    if weight.dtype not in (torch.int8, FP8):
        raise layer.wrong(f"a weight of {weight.dtype}")
    name = next((name for name in ("weight_scale_inv", "weight_scale", "scale") if name in layer), "weight_scale")
    scales, (num_outputs, num_inputs) = _steps(layer, name), weight.shape
    zeros = layer.get("weight_zero_point")
    if zeros is not None and zeros.any():
        raise layer.wrong("a weight_zero_point that is not 0")
    if weight.dtype == torch.int8 and found.is_w4a8:
        return _w4a8(layer, weight, scales.reshape(num_outputs, -1))
    of = torch.zeros(num_inputs, dtype=torch.int64)
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(num_outputs, 1)
    elif scales.shape in ((num_outputs,), (num_outputs, 1)):
        scales = scales.reshape(num_outputs, 1)
    else:
        rows, columns = found.block or (0, 0)
        if rows and scales.shape == (-(-num_outputs // rows), -(-num_inputs // columns)):
            scales = scales.repeat_interleave(rows, dim=0)[:num_outputs]
            of = torch.arange(num_inputs) // columns
        elif scales.dim() == 2 and len(scales) == num_outputs:
            of = runs(layer, num_inputs, scales.shape[1], found.group_size)
        else:
            raise layer.wrong(f"{name} of {list(scales.shape)} for a weight of {list(weight.shape)}")
    if weight.dtype == torch.int8 and found.has_int8_activations and scales.shape[1] == 1:
        if missing := [part for part in found.input_parts if part not in layer]:
            raise layer.wrong(f"static activations without {missing[0]}")
        parts = {"int8_codes": weight, "int8_scales": scales[:, 0]}
        if (step := layer.get("input_scale")) is not None:
            zero = layer.get("input_zero_point")
            parts["int8_inputs"] = inputs_of(layer, step, zero)
        return parts
    return grouped(layer, weight, scales, torch.zeros_like(scales), of)
