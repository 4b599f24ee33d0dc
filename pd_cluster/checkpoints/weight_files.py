"""Checks safetensors files without torch: whether they are complete and plain, and a digest to compare them by.

Quantized weights are recognized by what quantizers leave behind: their own description files, tensors of scales,
weights of integers or eight-bit floats. Loaded as they are, they would be numbers without their scales.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pd_cluster.checkpoints.plain_files import open_plain, read_plain
from pd_cluster.checkpoints.safetensors_header import Header, read_header
from pd_cluster.errors import ModelError

SAMPLE_NBYTES = 64 << 10
WHOLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Names of a text model's weights in a multimodal folder: as transformers 5 and 4 write them, without a head, and where
# the text model has no prefix of its own.
TEXT_WEIGHTS = re.compile(
    r"(?:model\.language_model|language_model\.model|language_model|model(?!\.(?:visual|vision|audio)))"
    r"\.(?P<rest>(?:model\.)?(?:embed_tokens|layers|norm)\..+)|(?:language_model\.|model\.)?(?P<head>lm_head\..+)"
)
NO_QUANTIZATION = "quantized weights that are not supported"
WAY_OUT = "give the model in float32, float16 or bfloat16"
# A quantizer's file -> the method, if the file does not name it
QUANTIZERS_FILES = {
    "hf_quant_config.json": "modelopt",
    "quant_model_description*.json": "msmodelslim",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
QUANTIZERS_FIELDS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
METHOD_FIELDS = ("quant_method", "quant_algo", "model_quant_type", "format")
QUANTIZERS_TENSORS = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_offset", "weight_zero_point", "weight_packed"),
    *("weight_shape", "weight_g_idx", "weight_global_scale", "input_global_scale", "input_zero_point"),
    *("input_scale", "input_offset", "output_scale", "k_scale", "v_scale", "kv_scale", "deq_scale", "quant_bias"),
    *("kv_cache_scale", "kv_cache_offset", "dequant_scale", "quant_scale", "scale_bias"),
    *("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "SCB", "W_q"),
    *("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
)
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # of weights as numbers
NUMBERS = ("weight", "gate_up_proj", "down_proj")  # last parts of names that always are weights
# Buffers that are no floats, which earlier versions of transformers saved and modules compute today: masks of GPT-2,
# GPT-NeoX and their kin, and positions.
BUFFERS = re.compile(r"(?:^|\.)(?:(?:attn|attention)\.(?:masked_)?bias|position_ids)$")


def quantized(place: str, method: str = "") -> ModelError:
    """Returns the refusal of quantized weights. `place`: the file, and the field or tensor in it."""
    return ModelError(f"{place}: {NO_QUANTIZATION}{f' ({method})' if method else ''}; {WAY_OUT}")


def method_of(settings: object) -> str:
    """Returns the method that a quantizer's settings name; "" if they name none."""
    if not isinstance(settings, dict):
        return ""
    for name in METHOD_FIELDS:
        if value := settings.get(name):
            return value if isinstance(value, str) and re.fullmatch(r"[\w.:/ -]{1,60}", value) else reprlib.repr(value)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return method_of(settings.get("quantization"))


def weight_files(folder: Path) -> Iterator[Path]:
    """Yields the files that hold the model, chosen as transformers does: one whole file, or the files of the index.

    Without either, all safetensors files, which only ranks read. Raises ModelError for a malformed index.
    """
    index = folder / INDEX
    if (whole := folder / WHOLE_FILE).exists():
        yield whole
    elif index.exists():
        try:
            yield from (folder / name for name in sorted(set(json.loads(read_plain(index))["weight_map"].values())))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: cannot be read as an index of weights: {error}") from error
    else:
        yield from sorted(folder.glob("*.safetensors"))


def text_name(key: str) -> str:
    """Returns a weight's name in the text model by itself; "" for a weight of another part."""
    found = TEXT_WEIGHTS.fullmatch(key)
    if found is None:
        return ""
    return found["head"] or f"model.{found['rest'].removeprefix('model.')}"


def weights_digest(file: Path, is_plain: Callable[[str], bool], meaning: Callable[[str], str] = str) -> bytes:
    """Digests the header and samples (start, middle, end of the data) of one file.

    `is_plain`: whether the model reads a tensor as numbers, by its name. `meaning`: of the header's dtypes. Raises
    ModelError: incomplete, or such a tensor is recognizably quantized.
    """
    header = _read_header(file)
    for name, dtype in ((name, meaning(str(entry["dtype"]))) for name, entry in header.entries.items()):
        last = name.rpartition(".")[2]
        is_code = dtype.startswith(("F8", "F6", "F4")) or (last in NUMBERS and dtype not in PLAIN_DTYPES)
        if is_plain(name) and (is_code or last in QUANTIZERS_TENSORS):
            raise quantized(f"{file}: {name} ({dtype})")
    digest = hashlib.sha256(header.data)
    data_start, size = len(header.data), header.file_nbytes
    with open_plain(file) as stream:
        for offset in (data_start, (data_start + size) // 2, max(data_start, size - SAMPLE_NBYTES)):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_NBYTES))
    return digest.digest()


def whole_digest(folder: Path) -> str:
    """Digests every byte of the model's weight files, in hex: for what outlives them. Raises ModelError."""
    digest = hashlib.sha256()
    for file in sorted({*folder.glob("*.safetensors"), *weight_files(folder)}):
        try:
            with open_plain(file) as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
    return digest.hexdigest()


def stored_dtypes(file: Path) -> dict[str, str]:
    """Maps the names of a file's tensors to their dtypes, as safetensors calls them. Raises ModelError."""
    return {name: str(entry["dtype"]) for name, entry in _read_header(file).entries.items()}


def num_weights(folder: Path) -> int:
    """Estimates the number of weights in a folder's safetensors files: their bytes divided by two."""
    return weights_nbytes(folder) // 2


def weights_nbytes(folder: Path) -> int:
    """Returns the size of a folder's safetensors files."""
    return sum(os.path.getsize(file) for file in folder.glob("*.safetensors"))


def _read_header(file: Path) -> Header:
    """Raises ModelError: incomplete, or with more than its tensors."""
    try:
        with open_plain(file) as stream:
            return read_header(file, stream)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
