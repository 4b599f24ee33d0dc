"""Writes quantized checkpoints in quantizers' formats, bit by bit, each with a plain copy of the same numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
LINEAR = re.compile(r"(?:model|backbone)\.layers\.\d+\..*(?:_proj|\.w[123])\.weight")
OUTLYING = re.compile(r"\.(?:v_proj|up_proj|w3)\.(?:weight|bias)$")
OUTLIER = 64.0
FP8 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column in each slot of a word


def words_of(fields: Any, bits: int) -> torch.Tensor:
    """Packs each row of unsigned fields [rows, n] into int32 words as one bit stream, lowest bits first."""
    rows = np.asarray(fields, dtype=np.int64)
    stream = (rows[..., None] >> np.arange(bits) & 1).reshape(len(rows), -1).astype(np.uint8)
    whole = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(whole, axis=1, bitorder="little").view("<i4"))


def awq_words(fields: Any) -> torch.Tensor:
    """Packs eight columns per word in AWQ's order."""
    rows, columns = np.asarray(fields).shape
    slots = np.asarray(fields).reshape(rows, columns // 8, 8)[..., list(AWQ_COLUMNS)]
    return words_of(slots.reshape(rows, columns), 4)


def affine(weight: torch.Tensor, bits: int, group: int, is_symmetric: bool) -> tuple[Any, Any, Any]:
    """Returns unsigned codes [N, K], scales [N, G] (of float16) and unsigned zeros [N, G]."""
    groups = weight.reshape(len(weight), -1, group)
    most = (1 << bits) - 1
    if is_symmetric:
        scales = (groups.abs().amax(-1) / (most / 2)).half().float().clamp(min=1e-4)
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / most).half().float().clamp(min=1e-4)
        zeros = (-low / scales).round().clamp(0, most)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.reshape(weight.shape).long(), scales, zeros.long()


def numbers_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    groups = codes.double().reshape(*scales.shape, -1)
    return ((groups - zeros[..., None]) * scales.double()[..., None]).reshape(codes.shape).float()


Written = tuple[Tensors, torch.Tensor]  # tensors by name suffix, and the dequantized weight
Write = Callable[[torch.Tensor, int], Written]  # takes a weight and a group size


def awq(weight: torch.Tensor, group: int) -> Written:
    codes, scales, zeros = affine(weight, 4, group, is_symmetric=False)
    parts = {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.half()}
    return parts, numbers_of(codes, scales, zeros)


def awq_gemv(weight: torch.Tensor, group: int) -> Written:
    codes, scales, zeros = affine(weight, 4, group, is_symmetric=False)
    padding = -zeros.shape[1] % 8
    wide = torch.nn.functional.pad(zeros, (0, padding)), torch.nn.functional.pad(scales, (0, padding))
    return {"qweight": words_of(codes, 4), "qzeros": words_of(wide[0], 4), "scales": wide[1].half()}, numbers_of(
        codes, scales, zeros
    )


def gptq(bits: int, is_symmetric: bool = True, is_first: bool = True, has_order: bool = False) -> Write:
    def write(weight: torch.Tensor, group: int) -> Written:
        num_inputs = weight.shape[1]
        order = torch.randperm(num_inputs) if has_order else torch.arange(num_inputs)
        codes, scales, zeros = affine(weight[:, order], bits, group, is_symmetric)
        of = torch.empty(num_inputs, dtype=torch.int32)
        of[order] = (torch.arange(num_inputs) // group).int()
        back = torch.argsort(order)
        stored = (zeros - (1 if is_first else 0)) & ((1 << bits) - 1)
        parts = {
            "qweight": words_of(codes[:, back], bits).T.contiguous(),
            "qzeros": words_of(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": of,
        }
        return parts, numbers_of(codes, scales, zeros)[:, back]

    return write


def packed(bits: int, is_symmetric: bool = True) -> Write:
    """Writes compressed-tensors' format pack-quantized."""

    def write(weight: torch.Tensor, group: int) -> Written:
        codes, scales, zeros = affine(weight, bits, group, is_symmetric)
        parts = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
        return parts, numbers_of(codes, scales, zeros)

    return write


def int8(weight: torch.Tensor, group: int) -> Written:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def fp8_blocks(name: str = "weight_scale_inv") -> Write:
    """Writes FP8 with a scale for each block of `group` rows and columns; the last blocks are smaller."""

    def write(weight: torch.Tensor, group: int) -> Written:
        rows, columns = (-(-size // group) for size in weight.shape)
        codes, numbers = torch.empty(weight.shape, dtype=FP8), torch.empty_like(weight)
        scales = torch.empty(rows, columns)
        for i in range(rows):
            for j in range(columns):
                at = slice(i * group, (i + 1) * group), slice(j * group, (j + 1) * group)
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).clamp(-448, 448).to(FP8)
                numbers[at] = codes[at].float() * scales[i, j]
        return {"weight": codes, name: scales}, numbers

    return write


def fp8_whole(weight: torch.Tensor, group: int) -> Written:
    scale = weight.abs().max() / 448
    codes = (weight / scale).clamp(-448, 448).to(FP8)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, codes.float() * scale


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Returns the four-bit codes of values up to 6."""
    nearest = (values.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    return (nearest + 8 * (values < 0)).to(torch.uint8)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _values(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*E2M1, *(-each for each in E2M1)])[codes.long()]


def mxfp4(weight: torch.Tensor, group: int = 32) -> Written:
    groups = weight.reshape(len(weight), -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-6) / 6)) + 1
    codes = _e2m1(groups / torch.exp2(exponents)[..., None])
    numbers = (_values(codes) * torch.exp2(exponents)[..., None]).reshape(weight.shape)
    return {
        "weight_packed": _halves(codes.reshape(weight.shape)),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, numbers


def nvfp4(weight: torch.Tensor, group: int = 16) -> Written:
    groups = weight.reshape(len(weight), -1, 16)
    total = torch.tensor([448 * 6 / float(weight.abs().max())])
    scales = (groups.abs().amax(-1) / 6 * total).to(FP8)
    steps = scales.float() / total
    codes = _e2m1(groups / steps[..., None].clamp(min=1e-9))
    parts = {
        "weight_packed": _halves(codes.reshape(weight.shape)),
        "weight_scale": scales,
        "weight_global_scale": total,
    }
    return parts, (_values(codes) * steps[..., None]).reshape(weight.shape)


@dataclass(frozen=True)
class Format:
    """`config`: quantization_config; `file`: name and content of a separate description file."""

    write: Write
    config: dict[str, Any] | None
    group: int = 16
    file: tuple[str, dict[str, Any]] | None = None


def _gptq(bits: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 16, **changes}


def _ct(name: str, num_bits: int, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": num_bits, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


FLOATS = {"num_bits": 8, "type": "float"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
FORMATS: dict[str, Format] = {
    "awq": Format(awq, {**AWQ, "version": "gemm"}),
    "awq, file of its own": Format(awq, None, file=("quant_config.json", {"w_bit": 4, "q_group_size": 16})),
    "awq gemv": Format(awq_gemv, {**AWQ, "version": "gemv"}),
    "gptq 4": Format(gptq(4), _gptq(4, sym=True)),
    "gptq 8": Format(gptq(8), _gptq(8, sym=True)),
    "gptq 3": Format(gptq(3), _gptq(3, sym=True), group=32),
    "gptq 2": Format(gptq(2), _gptq(2, sym=True)),
    "gptq asymmetric": Format(gptq(4, is_symmetric=False), _gptq(4, sym=False)),
    "gptq v2": Format(gptq(4, False, is_first=False), _gptq(4, sym=False, checkpoint_format="gptq_v2")),
    "gptq desc_act": Format(gptq(4, has_order=True), _gptq(4, desc_act=True)),
    "gptq, file of its own": Format(gptq(4), None, file=("quantize_config.json", {"bits": 4, "group_size": 16})),
    "auto-round": Format(gptq(4), {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}),
    "packed 4": Format(packed(4), _ct("pack-quantized", 4)),
    "packed 8": Format(packed(8), _ct("pack-quantized", 8)),
    "packed asymmetric": Format(packed(4, False), _ct("pack-quantized", 4, symmetric=False)),
    "int8 weights": Format(int8, _ct("int-quantized", 8)),
    "fp8 blocks": Format(fp8_blocks(), {"quant_method": "fp8", "weight_block_size": [40, 40]}, group=40),
    "fp8 whole": Format(fp8_whole, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 of compressed-tensors": Format(fp8_whole, _ct("float-quantized", 8, FLOATS, type="float")),
    "mxfp4": Format(mxfp4, _ct("mxfp4-pack-quantized", 4, type="float"), group=32),
    "nvfp4": Format(nvfp4, _ct("nvfp4-pack-quantized", 4, type="float")),
}
INT8_INPUTS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
W8A8 = Format(int8, _ct("int-quantized", 8, INT8_INPUTS))


def int4_in_bytes(weight: torch.Tensor, group: int) -> Written:
    """Writes compressed-tensors' four-bit int-quantized: one code per byte."""
    parts, numbers = packed(4)(weight, group)
    codes = (numbers.reshape(len(weight), -1, group) / parts["weight_scale"].unsqueeze(-1)).round().flatten(1)
    return {"weight": codes.to(torch.int8), "weight_scale": parts["weight_scale"]}, numbers


def with_outliers(folder: Path) -> Path:
    """Makes the last inner features of attention and MLPs much larger; only the last rank holds these."""
    tensors: Tensors = load_file(folder / FILE)
    for name, tensor in tensors.items():
        if OUTLYING.search(name):
            tensor[-max(1, len(tensor) // 16) :] *= OUTLIER
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def rewritten(folder: Path, to: Path, form: Format) -> tuple[Path, Path]:
    """Copies a plain folder twice: quantized in the format, and with the dequantized numbers as plain weights."""
    quantized, plain = (Path(shutil.copytree(folder, to / name)) for name in ("quantized", "plain"))
    codes, numbers = {}, {}
    torch.manual_seed(0)
    for name, tensor in load_file(folder / FILE).items():
        if not LINEAR.fullmatch(name):
            codes[name] = numbers[name] = tensor
            continue
        parts, numbers[name] = form.write(tensor, form.group)
        codes |= {name.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
    save_file(codes, quantized / FILE, {"format": "pt"})
    save_file({name: each.contiguous() for name, each in numbers.items()}, plain / FILE, {"format": "pt"})
    if form.config is not None:
        change_config(quantized, quantization_config=form.config)
    if form.file is not None:
        (quantized / form.file[0]).write_text(json.dumps(form.file[1]))
    return quantized, plain


def experts_in_mxfp4(plain: Path, quantized: Path) -> None:
    """Changes two gpt_oss folders: one to the published MXFP4 format, one to the dequantized numbers.

    Blocks are [experts, outputs, groups, 16]; transformers' weight is transposed.
    """
    codes = load_file(plain / FILE)
    numbers = dict(codes)
    names = [name for name in codes if re.search(r"experts\.(gate_up|down)_proj$", name)]
    assert names
    for name in names:
        coded = [mxfp4(expert.T.contiguous()) for expert in codes.pop(name)]
        blocks = torch.stack([parts["weight_packed"] for parts, _ in coded])
        codes[f"{name}_blocks"] = blocks.reshape(*blocks.shape[:2], -1, 16).contiguous()
        codes[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts, _ in coded])
        numbers[name] = torch.stack([each.T for _, each in coded]).contiguous()
    save_file(numbers, plain / FILE, {"format": "pt"})
    save_file(codes, quantized / FILE, {"format": "pt"})
    change_config(quantized, quantization_config={"quant_method": "mxfp4"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# ---- int8 weights with int8 activations


def ascend_dynamic(weight: torch.Tensor, group: int) -> Written:
    parts, numbers = int8(weight, group)
    return {**parts, "weight_offset": torch.zeros_like(parts["weight_scale"])}, numbers


def ascend_w8a16(weight: torch.Tensor, group: int) -> Written:
    """Writes int8 codes, to which an offset is added."""
    scales = (weight.amax(-1, keepdim=True) - weight.amin(-1, keepdim=True)) / 255
    offset = (weight.amin(-1, keepdim=True) / scales).round() + 128
    codes = ((weight / scales).round() - offset).clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales, "weight_offset": offset}, (codes + offset) * scales


def ascend_w4a16(packing: str) -> Write:
    """Writes four-bit codes with an offset: one or two codes per byte, or eight per word."""

    def write(weight: torch.Tensor, group: int) -> Written:
        groups = weight.float().view(len(weight), -1, group)
        scales = (groups.amax(-1) - groups.amin(-1)) / 15
        offset = (groups.amin(-1) / scales).round() + 8
        codes = ((groups / scales.unsqueeze(-1)).round() - offset.unsqueeze(-1)).clamp(-8, 7)
        numbers = ((codes + offset.unsqueeze(-1)) * scales.unsqueeze(-1)).view(weight.shape)
        flat = codes.to(torch.int8).view(weight.shape)
        if packing == "pairs":
            flat = ((flat[:, ::2] & 15) | (flat[:, 1::2] << 4)).to(torch.int8)
        elif packing == "words":
            flat = words_of((flat & 15).int(), 4)
        return {"weight": flat, "weight_scale": scales, "weight_offset": offset}, numbers

    return write


def ascend_static(weight: torch.Tensor, group: int, dtype: torch.dtype = torch.float32) -> Written:
    """Writes one scale and zero point for all activations; the bias is in units of the product's scale."""
    parts, numbers = int8(weight, group)
    step, zero = torch.tensor([0.04]), torch.tensor([3.0])
    scales = step * parts["weight_scale"][:, 0]
    stored = scales if dtype != torch.int64 else scales.view(torch.int32).to(torch.int64)
    sums = parts["weight"].long().sum(-1)
    described = {"deq_scale": stored, "quant_bias": (-sums * 3).int(), "input_scale": step, "input_offset": zero}
    return {"weight": parts["weight"], **described}, numbers


def smooth_quant(weight: torch.Tensor, group: int) -> Written:
    parts, numbers = int8(weight, group)
    return {"weight": parts["weight"], "scale": parts["weight_scale"]}, numbers


def described(kind: str) -> tuple[str, dict[str, Any]]:
    """Returns msmodelslim's description file for a model of up to four layers."""
    names = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    names += [f"block_sparse_moe.experts.{expert}.w{each}" for expert in range(4) for each in (1, 2, 3)]
    types = {f"model.layers.{index}.{name}.weight": kind for index in range(4) for name in names}
    return "quant_model_description.json", {"model_quant_type": kind, "lm_head.weight": "FLOAT", **types}


W4A8 = Format(int4_in_bytes, _ct("int-quantized", 4, INT8_INPUTS))
INT8_FORMATS: dict[str, Format] = {
    "compressed-tensors": W8A8,
    "compressed-tensors w4a8": W4A8,
    "compressed-tensors w4a8, packed": Format(packed(4), _ct("pack-quantized", 4, INT8_INPUTS)),
    "smooth_quant": Format(smooth_quant, {"quant_method": "smooth_quant", "quant_dtype": "int8"}),
    "msmodelslim": Format(ascend_dynamic, None, file=described("W8A8_DYNAMIC")),
    "msmodelslim static": Format(ascend_static, None, file=described("W8A8")),
}
for packing in ("bytes", "pairs", "words"):
    name, said = described("W4A16")
    FORMATS[f"msmodelslim W4A16, {packing}"] = Format(
        ascend_w4a16(packing), None, group=32, file=(name, {**said, "group_size": 32})
    )
FORMATS["msmodelslim W8A16"] = Format(ascend_w8a16, None, file=described("W8A16"))
