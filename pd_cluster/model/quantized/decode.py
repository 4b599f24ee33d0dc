"""The tensors of one quantized linear layer, in any known format, as the parts of a form (model/quantized/weight).

Which format a layer has is decided by its tensors; config.json only says what they leave open.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from pd_cluster.checkpoints.quantized import Quantization
from pd_cluster.errors import ModelError
from pd_cluster.model.layers.weight import Tensors
from pd_cluster.model.quantized.unpack import WORD_BITS, awq_fields, e2m1_doubled, fields, nibbles

Parts = dict[str, torch.Tensor]
INT_BITS = (2, 3, 4, 8)
FP8 = torch.float8_e4m3fn
W4A8_BITS = 4
# Scales of activations and of the KV cache, which stay in the model's precision: nothing is lost without them.
MORE_PRECISE = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "kv_scale")
WEIGHTS = ("weight", "qweight", "weight_packed", "blocks")  # one of them is what the others describe


class Layer:
    """The tensors of one layer, taken one by one; `finish` refuses what is left over."""

    def __init__(self, place: str, tensors: Tensors) -> None:
        self.place = place
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> torch.Tensor:
        """Raises ModelError if it is missing."""
        if name not in self._left:
            raise ModelError(f"{self.place}: {name} is missing beside {', '.join(sorted(self._left))}")
        return self._left.pop(name)

    def get(self, name: str) -> torch.Tensor | None:
        return self._left.pop(name, None)

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.place}: {what}; the file does not fit its description, copy or make it again")

    def finish(self) -> None:
        for name in MORE_PRECISE:
            self._left.pop(name, None)
        if self._left:
            raise ModelError(f"{self.place}: {sorted(self._left)[0]} has no meaning here and would be left out")


def decoded(place: str, tensors: Tensors, found: Quantization, ascend_type: str = "") -> Parts:
    """Returns the parts of a form, with the layer's bias. Raises ModelError that names the layer and the tensor."""
    layer = Layer(place, tensors)
    bias = layer.get("bias")
    try:
        parts = _reader(layer, found, ascend_type)(layer, found)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise layer.wrong(" ".join(str(error).split())[:200]) from error
    layer.finish()
    if bias is not None:
        parts["bias"] = bias
    return {name: tensor.contiguous() for name, tensor in parts.items()}


def _reader(layer: Layer, found: Quantization, ascend_type: str) -> Callable[[Layer, Quantization], Parts]:
    if ascend_type:
        return ASCEND[ascend_type]
    if "qweight" in layer:
        return _awq if found.method == "awq" else _gptq
    if "weight_packed" in layer:
        return _packed
    if "blocks" in layer:
        return _mxfp4_blocks
    return _eight_bits


def _grouped(layer: Layer, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, of: torch.Tensor) -> Parts:
    """`of` [K]: the group of each input feature, of scales and zeros [..., N, G]."""
    num_inputs = codes.shape[-1]
    if len(of) != num_inputs or int(of.max()) >= scales.shape[-1] or int(of.min()) < 0:
        raise layer.wrong(f"{num_inputs} input features, and {scales.shape[-1]} groups of scales")
    if scales.shape[:-1] != codes.shape[:-1]:
        raise layer.wrong(f"{codes.shape[-2]} output features, and scales for {scales.shape[-2]}")
    starts = (of[1:] != of[:-1]).nonzero().flatten() + 1
    size = math.gcd(num_inputs, *starts.tolist())
    chosen = of[::size].to(torch.int64)
    return {
        "codes": codes,
        "code_scales": scales.to(torch.float32)[..., chosen],
        "code_zeros": zeros.to(torch.float32)[..., chosen],
    }


def _runs(layer: Layer, num_inputs: int, num_groups: int) -> torch.Tensor:
    """Returns the groups of input features, of equal size."""
    if num_groups < 1 or num_inputs % num_groups:
        raise layer.wrong(f"{num_inputs} input features cannot have {num_groups} groups of scales")
    return torch.arange(num_inputs) // (num_inputs // num_groups)


def _awq(layer: Layer, found: Quantization) -> Parts:
    words, scales, zeros = layer.take("qweight"), layer.take("scales"), layer.take("qzeros")
    if words.dtype != torch.int32 or zeros.dtype != torch.int32:
        raise layer.wrong(f"words of {words.dtype}")
    if found.is_by_rows:
        codes = fields(words, 4)
        num_groups = codes.shape[1] // (found.group_size if found.group_size > 0 else codes.shape[1])
        scales, zeros = scales[:, :num_groups], fields(zeros, 4)[:, :num_groups]  # both are padded to whole words
    else:
        codes, scales, zeros = awq_fields(words).t(), scales.t(), awq_fields(zeros).t()
    if zeros.shape != scales.shape:
        raise layer.wrong(f"qzeros for {list(zeros.shape)} groups, scales for {list(scales.shape)}")
    return _grouped(layer, codes.to(torch.int8), scales, zeros, _runs(layer, codes.shape[1], scales.shape[1]))


def _gptq(layer: Layer, found: Quantization) -> Parts:
    words, scales, zero_words = layer.take("qweight"), layer.take("scales"), layer.take("qzeros")
    num_outputs = scales.shape[1]
    bits = zero_words.shape[1] * WORD_BITS // num_outputs
    if bits not in INT_BITS or words.dtype != torch.int32 or zero_words.dtype != torch.int32:
        raise layer.wrong(f"qzeros of {zero_words.shape[1]} words for {num_outputs} output features")
    codes = fields(words.t().contiguous(), bits)
    zeros = (fields(zero_words, bits) + found.zero_offset) & ((1 << bits) - 1)
    of = layer.get("g_idx")
    if of is None:
        of = _runs(layer, codes.shape[1], scales.shape[0])
    half = 128 if bits == 8 else 0  # codes of eight bits as int8
    return _grouped(layer, (codes - half).to(torch.int8), scales.t(), (zeros - half).t(), of)


def _packed(layer: Layer, found: Quantization) -> Parts:
    packed, scales = layer.take("weight_packed"), layer.take("weight_scale")
    if packed.dtype == torch.uint8:
        layer.get("weight_shape")
        return _small_floats(layer, packed, scales)
    num_outputs, num_inputs = (int(each) for each in layer.take("weight_shape"))
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
    if of is None or int(of.min()) < 0:  # -1: no order of its own
        if found.is_w4a8 and bits == W4A8_BITS:
            return _w4a8(layer, codes.to(torch.int8), scales, zeros)
        of = _runs(layer, num_inputs, scales.shape[1])
    elif found.is_w4a8 and bits == W4A8_BITS:
        raise layer.wrong("int8 activations, and a weight_g_idx")
    return _grouped(layer, codes.to(torch.int8), scales, zeros, of)


def _w4a8(layer: Layer, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Parts:
    """Codes of 4 bits for activations in int8; scales [N, G]."""
    if zeros is not None and bool(zeros.any()):
        raise layer.wrong("int8 activations, and a weight_zero_point that is not 0")
    _runs(layer, codes.shape[1], scales.shape[1])
    least, most = (int(code) for code in codes.aminmax())
    if least < -8 or most > 7 or scales.shape[0] != codes.shape[0]:
        raise layer.wrong(
            f"codes from {least} to {most}, {scales.shape[0]} rows of scales for {codes.shape[0]} of codes"
        )
    return {"w4a8_codes": codes, "w4a8_scales": scales.to(torch.float32)}


def _small_floats(layer: Layer, packed: torch.Tensor, scales: torch.Tensor) -> Parts:
    """nvfp4 (groups of 16, e4m3 scales and a divisor) and mxfp4 (groups of 32, powers of two)."""
    if scales.dtype == torch.uint8:
        steps = torch.exp2(scales.to(torch.float32) - 127)
    else:
        total = layer.get("weight_global_scale")
        steps = scales.to(torch.float32)
        steps = steps / total.to(torch.float32) if total is not None else steps * layer.take("weight_scale_2").float()
    return _of_e2m1(layer, packed, steps)


def _of_e2m1(layer: Layer, packed: torch.Tensor, steps: torch.Tensor) -> Parts:
    codes = e2m1_doubled(packed)
    of = _runs(layer, codes.shape[-1], steps.shape[-1])
    return _grouped(layer, codes, steps / 2, torch.zeros_like(steps), of)


def _mxfp4_blocks(layer: Layer, found: Quantization) -> Parts:
    """Experts of gpt-oss: blocks [E, N, G, 16] uint8, scales [E, N, G] uint8."""
    blocks, scales = layer.take("blocks"), layer.take("scales")
    return _of_e2m1(layer, blocks.flatten(-2), torch.exp2(scales.to(torch.float32) - 127))


def _eight_bits(layer: Layer, found: Quantization) -> Parts:
    weight = layer.take("weight")
    if weight.dtype == torch.uint8 and "weight_scale_2" in layer:  # ModelOpt's nvfp4
        return _small_floats(layer, weight, layer.take("weight_scale"))
    if weight.dtype not in (torch.int8, FP8):
        raise layer.wrong(f"a weight of {weight.dtype}")
    name = next((name for name in ("weight_scale_inv", "weight_scale", "scale") if name in layer), "weight_scale")
    scales, (num_outputs, num_inputs) = layer.take(name).to(torch.float32), weight.shape
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
        if not rows or scales.shape != (-(-num_outputs // rows), -(-num_inputs // columns)):
            raise layer.wrong(f"{name} of {list(scales.shape)} for a weight of {list(weight.shape)}")
        scales = scales.repeat_interleave(rows, dim=0)[:num_outputs]
        of = torch.arange(num_inputs) // columns
    if weight.dtype == torch.int8 and found.has_int8_activations and scales.shape[1] == 1:
        parts = {"int8_codes": weight, "int8_scales": scales[:, 0]}
        if (step := layer.get("input_scale")) is not None:
            zero = layer.get("input_zero_point")
            parts["int8_inputs"] = torch.stack((step.float().reshape(()), _number(zero)))
        return parts
    return _grouped(layer, weight, scales, torch.zeros_like(scales), of)


def _number(tensor: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if tensor is None else tensor.to(torch.float32).reshape(())


def _ascend_w8a8(layer: Layer, found: Quantization) -> Parts:
    """`quant_bias` holds the bias in units of `deq_scale`, less the product of the zero point."""
    codes, step, zero = layer.take("weight"), layer.take("input_scale").float(), layer.take("input_offset").float()
    scales, whole = layer.take("deq_scale"), layer.take("quant_bias")
    if scales.dtype == torch.int64:  # the low 32 bits are a float32's
        scales = (scales & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    layer.get("weight_scale"), layer.get("weight_offset")  # in deq_scale already
    sums = codes.sum(-1, dtype=torch.int64)
    bias = (whole.to(torch.int64) + sums * int(zero)).to(torch.float32) * scales
    inputs = torch.stack((step.reshape(()), zero.reshape(())))
    return {"int8_codes": codes, "int8_scales": scales.float() / step, "int8_inputs": inputs, "bias": bias}


def _ascend_dynamic(layer: Layer, found: Quantization) -> Parts:
    codes, scales, offset = layer.take("weight"), layer.take("weight_scale"), layer.get("weight_offset")
    if offset is not None and offset.any():
        raise layer.wrong("a weight_offset that is not 0")
    return {"int8_codes": codes, "int8_scales": scales.float().reshape(-1)}


def _ascend_w8a16(layer: Layer, found: Quantization) -> Parts:
    """The operators of NPUs add the offset: a weight is (code + offset) * scale."""
    codes, scales = layer.take("weight"), layer.take("weight_scale").float()
    offset = layer.get("weight_offset")
    scales = scales.reshape(codes.shape[0], -1)
    zeros = torch.zeros_like(scales) if offset is None else -offset.float().reshape_as(scales)
    return _grouped(layer, codes, scales, zeros, _runs(layer, codes.shape[1], scales.shape[1]))


def _ascend_w4a16(layer: Layer, found: Quantization) -> Parts:
    """As W8A16, of signed codes: one or two of them in a byte, or eight in an int32, the lowest bits first."""
    stored, scales = layer.take("weight"), layer.take("weight_scale").float()
    offset = layer.get("weight_offset")
    if scales.shape[0] != stored.shape[0]:
        raise layer.wrong(f"weight of {stored.shape[0]} rows, scales of {scales.shape[0]}: outputs packed in pairs")
    scales = scales.reshape(stored.shape[0], -1)
    codes = _signed_four(stored, scales.shape[1] * found.group_size if found.group_size > 0 else 0)
    if codes is None:
        raise layer.wrong(f"weight of {stored.dtype} {list(stored.shape)} for {scales.shape[1]} groups of scales")
    zeros = torch.zeros_like(scales) if offset is None else -offset.float().reshape_as(scales)
    return _grouped(layer, codes, scales, zeros, _runs(layer, codes.shape[1], scales.shape[1]))


def _signed_four(stored: torch.Tensor, num_inputs: int) -> torch.Tensor | None:
    """Returns codes of -8 to 7 [N, K] int8. `num_inputs`: K; 0: unknown. None: neither form fits."""
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


ASCEND = {
    "W8A8": _ascend_w8a8,
    "W8A8_DYNAMIC": _ascend_dynamic,
    "W8A16": _ascend_w8a16,
    "W4A16": _ascend_w4a16,
}
