"""Checks safetensors files without torch: whether they are complete and unquantized, and a digest to compare them by.

Quantized weights are recognized by what quantizers leave behind: their own description files, tensors of scales,
weights of integers or eight-bit floats. Loaded as they are, they would be numbers without their scales.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError

MAX_HEADER_NBYTES = 100 << 20
SAMPLE_NBYTES = 64 << 10
NO_QUANTIZATION = "quantized weights are not supported yet; give the model in float32, float16 or bfloat16"
# NVIDIA's ModelOpt, Ascend's msmodelslim (several names), AutoGPTQ, AutoAWQ
QUANTIZERS_FILES = (
    "hf_quant_config.json",
    "quant_model_description*.json",
    "quantize_config.json",
    "quant_config.json",
)
QUANTIZERS_FIELDS = ("quantization_config", "compression_config")
QUANTIZERS_TENSORS = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_offset", "weight_zero_point", "weight_packed"),
    *("input_scale", "input_offset", "output_scale", "k_scale", "v_scale", "deq_scale", "quant_bias"),
    *("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map"),
)
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # allowed for tensors that are called weight


def check_plain(path: Path, config: dict[str, Any]) -> None:
    """Checks a model folder. Raises ModelError that names the field or file of a quantizer."""
    for field in QUANTIZERS_FIELDS:
        if field in config:
            raise ModelError(f"{path / 'config.json'}: {field}: {NO_QUANTIZATION}")
    for pattern in QUANTIZERS_FILES:
        for file in sorted(path.glob(pattern)):
            raise ModelError(f"{file}: {NO_QUANTIZATION}")


def weights_digest(file: Path) -> bytes:
    """Digests the header and samples (start, middle, end of the data) of one file. Raises ModelError: incomplete or
    quantized.
    """
    size = os.path.getsize(file)
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_NBYTES + 1
        if length > min(MAX_HEADER_NBYTES, size - 8):
            raise ModelError(f"{file}: not a safetensors file (its header does not fit the file)")
        header = stream.read(length)
        data_start = 8 + length
        _check_header(file, header, size - data_start)
        digest = hashlib.sha256(prefix + header)
        for offset in (data_start, (data_start + size) // 2, max(data_start, size - SAMPLE_NBYTES)):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_NBYTES))
    return digest.digest()


def num_weights(folder: Path) -> int:
    """Estimates the number of weights in a folder's safetensors files: their bytes divided by two."""
    return sum(os.path.getsize(file) for file in folder.glob("*.safetensors")) // 2


def _check_header(file: Path, header: bytes, data_nbytes: int) -> None:
    try:
        tensors = json.loads(header)
        ends = {name: int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"}
        dtypes = {name: str(tensors[name]["dtype"]) for name in ends}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ModelError(f"{file}: not a safetensors file (its header is not the JSON of one)") from None
    if max(ends.values(), default=0) > data_nbytes:
        raise ModelError(
            f"{file}: cut short: its header tells of {max(ends.values())} bytes of weights, and {data_nbytes} are "
            f"there; copy or download it again"
        )
    for name, dtype in dtypes.items():
        last = name.rpartition(".")[2]
        if last in QUANTIZERS_TENSORS or (last == "weight" and dtype not in PLAIN_DTYPES):
            raise ModelError(f"{file}: {name} ({dtype}): {NO_QUANTIZATION}")
