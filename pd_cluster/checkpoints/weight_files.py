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
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from pd_cluster.errors import ModelError

MAX_HEADER_NBYTES = 100 << 20
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
            yield from (folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values())))
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
    prefix, header, dtypes, size = _read_header(file)
    for name, dtype in ((name, meaning(dtype)) for name, dtype in dtypes.items()):
        last = name.rpartition(".")[2]
        is_code = dtype.startswith(("F8", "F6", "F4")) or (last in NUMBERS and dtype not in PLAIN_DTYPES)
        if is_plain(name) and (is_code or last in QUANTIZERS_TENSORS):
            raise quantized(f"{file}: {name} ({dtype})")
    digest = hashlib.sha256(prefix + header)
    data_start = 8 + len(header)
    with file.open("rb") as stream:
        for offset in (data_start, (data_start + size) // 2, max(data_start, size - SAMPLE_NBYTES)):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_NBYTES))
    return digest.digest()


def whole_digest(folder: Path) -> str:
    """Digests every byte of the model's weight files, in hex: for what outlives them. Raises ModelError."""
    digest = hashlib.sha256()
    for file in sorted({*folder.glob("*.safetensors"), *weight_files(folder)}):
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
    return digest.hexdigest()


def stored_dtypes(file: Path) -> dict[str, str]:
    """Maps the names of a file's tensors to their dtypes, as safetensors calls them. Raises ModelError."""
    return _read_header(file)[2]


def num_weights(folder: Path) -> int:
    """Estimates the number of weights in a folder's safetensors files: their bytes divided by two."""
    return weights_nbytes(folder) // 2


def weights_nbytes(folder: Path) -> int:
    """Returns the size of a folder's safetensors files."""
    return sum(os.path.getsize(file) for file in folder.glob("*.safetensors"))


def _read_header(file: Path) -> tuple[bytes, bytes, dict[str, str], int]:
    """Returns the length's bytes, the header, dtypes by name, and the file's bytes. Raises ModelError: incomplete."""
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_NBYTES + 1
            if length > min(MAX_HEADER_NBYTES, size - 8):
                raise ModelError(f"{file}: not a safetensors file (its header does not fit the file)")
            header = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
    try:
        tensors = json.loads(header)
        ends = {name: int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"}
        dtypes = {name: str(tensors[name]["dtype"]) for name in ends}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ModelError(f"{file}: not a safetensors file (its header is not the JSON of one)") from None
    data_nbytes = size - 8 - length
    if max(ends.values(), default=0) > data_nbytes:
        raise ModelError(
            f"{file}: cut short: its header tells of {max(ends.values())} bytes of weights, and {data_nbytes} are "
            f"there; copy or download it again"
        )
    return prefix, header, dtypes, size
