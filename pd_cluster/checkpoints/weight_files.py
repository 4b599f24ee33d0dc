"""Checks without torch that safetensors files are complete and plain, and digests them.

Recognizes quantized weights by quantizers' files, by tensors of scales, and by weights of integers or eight-bit floats,
which are meaningless without their scales.
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
# Names of a text model's weights in a multimodal folder: as transformers 5 and 4 write them, those of models without an
# output layer, and those without a prefix.
TEXT_WEIGHTS = re.compile(
    r"(?:model\.language_model|language_model\.model|language_model|model(?!\.(?:visual|vision|audio)))"
    r"\.(?P<rest>(?:model\.)?(?:embed_tokens|layers|norm)\..+)|(?:language_model\.|model\.)?(?P<head>lm_head\..+)"
)
NO_QUANTIZATION = "quantized weights that are not supported"
WAY_OUT = "give the model in float32, float16 or bfloat16"
# a quantizer's file -> its method, if the file itself does not name it
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
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # the dtypes of unquantized weights
NUMBERS = ("weight", "gate_up_proj", "down_proj")  # last parts of the names of weights
# Non-float buffers that earlier versions of transformers saved and modules now compute: masks of GPT-2, GPT-NeoX and
# similar models, and positions.
BUFFERS = re.compile(r"(?:^|\.)(?:(?:attn|attention)\.(?:masked_)?bias|position_ids)$")


def quantized(place: str, method: str = "") -> ModelError:
    """Returns the error for quantized weights that are not supported. `place`: the file and its field or tensor."""
    return ModelError(f"{place}: {NO_QUANTIZATION}{f' ({method})' if method else ''}; {WAY_OUT}")


def method_of(settings: object) -> str:
    """Returns the method in a quantizer's settings; "" if they name none."""
    if not isinstance(settings, dict):
        return ""
    for name in METHOD_FIELDS:
        if value := settings.get(name):
            return value if isinstance(value, str) and re.fullmatch(r"[\w.:/ -]{1,60}", value) else reprlib.repr(value)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return method_of(settings.get("quantization"))


def weight_files(folder: Path) -> Iterator[Path]:
    """Yields the model's files, chosen as in transformers: one whole file, or the files that an index lists.

    If there is neither, yields all safetensors files, which only ranks read. Raises ModelError for a malformed index.
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
    """Returns a weight's name in the text model; "" for a weight of another part."""
    found = TEXT_WEIGHTS.fullmatch(key)
    if found is None:
        return ""
    return found["head"] or f"model.{found['rest'].removeprefix('model.')}"


def weights_digest(file: Path, is_plain: Callable[[str], bool], meaning: Callable[[str], str] = str) -> bytes:
    """Digests the header and samples (start, middle, end of the data) of one file.

    `is_plain`: whether a tensor of this name must be unquantized. `meaning`: maps a header's dtype to the actual one.
    Raises ModelError if the file is incomplete, or if such a tensor is quantized.
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
    """Returns a hex digest of every byte of the weight files, for data that outlives them. Raises ModelError."""
    digest = hashlib.sha256()
    for file in sorted({*folder.glob("*.safetensors"), *weight_files(folder)}):
        try:
            with open_plain(file) as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
    return digest.hexdigest()


def stored_dtypes(file: Path) -> dict[str, str]:
    """Maps a file's tensor names to safetensors' dtypes. Raises ModelError."""
    return {name: str(entry["dtype"]) for name, entry in _read_header(file).entries.items()}


def num_weights(folder: Path) -> int:
    """Estimates the number of weights in a folder's safetensors files as their bytes / 2."""
    return weights_nbytes(folder) // 2


def weights_nbytes(folder: Path) -> int:
    """Returns the size of a folder's safetensors files."""
    return sum(os.path.getsize(file) for file in folder.glob("*.safetensors"))


def _read_header(file: Path) -> Header:
    """Reads the header. Raises ModelError for an incomplete file or extra bytes."""
    try:
        with open_plain(file) as stream:
            return read_header(file, stream)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
