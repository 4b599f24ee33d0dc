"""The head of a sequence classifier: a linear layer on the last token's final hidden state, as in transformers.

A classifier's folder has `architectures: […ForSequenceClassification]`, the weight `score.weight`, and no output layer
of a language model. Imports no torch.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.safetensors_header import read_header
from pd_cluster.errors import ModelError

SUFFIX = "ForSequenceClassification"
HEAD = WEIGHT, BIAS = "score.weight", "score.bias"
MAX_NUMBERS = 1 << 24
ITEM_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}


class ClassificationHead(NamedTuple):
    """`weight`: a row of hidden_size values for each label. `is_multi_label`: labels have independent probabilities."""

    weight: list[array[float]]
    bias: list[float]
    labels: list[str]
    is_multi_label: bool


def is_classifier(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a sequence classifier."""
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(SUFFIX) for name in names)


def head_of(folder: Path) -> ClassificationHead | None:
    """Returns the folder's head; None if it has none. Raises ModelError."""
    config = read_json(folder / "config.json")
    if not is_classifier(config):
        return None
    found: dict[str, tuple[list[int], array[float]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= _read(file)
    if WEIGHT not in found:
        raise ModelError(f"{folder}: a classifier without {WEIGHT}")
    shape, values = found[WEIGHT]
    num_labels, size = (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
    if not num_labels or not size:
        raise ModelError(f"{folder}: {WEIGHT} has the shape {shape}; it must have a row for each label")
    bias = list(found[BIAS][1]) if BIAS in found else [0.0] * num_labels
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = [str(named.get(str(at), f"LABEL_{at}")) for at in range(num_labels)]
    is_multi_label = num_labels == 1 or config.get("problem_type") == "multi_label_classification"
    rows = [values[at * size : (at + 1) * size] for at in range(num_labels)]
    return ClassificationHead(rows, bias, labels, is_multi_label)


def _read(file: Path) -> dict[str, tuple[list[int], array[float]]]:
    """Returns the shapes and values of the head's tensors in one file. Raises ModelError."""
    found = {}
    try:
        with file.open("rb") as stream:
            header = read_header(file, stream)
            for name in HEAD:
                if (entry := header.entries.get(name)) is None:
                    continue
                start, stop = entry["data_offsets"]
                if entry["dtype"] not in ITEM_NBYTES or stop - start > MAX_NUMBERS * ITEM_NBYTES[entry["dtype"]]:
                    raise ModelError(f"{file}: {name} is {entry['dtype']}; it must be {', '.join(ITEM_NBYTES)}")
                stream.seek(len(header.data) + start, os.SEEK_SET)
                found[name] = entry["shape"], _floats(stream.read(stop - start), entry["dtype"])
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    return found


def _floats(data: bytes, dtype: str) -> array[float]:
    """Converts little-endian values to float32."""
    if dtype == "F16":
        return array("f", struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "BF16":  # bfloat16 is the upper half of a float32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        data = bytes(wide)
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
