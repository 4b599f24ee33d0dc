"""Finds weights with NaN or infinity in safetensors files, by their bits. Uses one thread, beside an engine's steps."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from pd_cluster.checkpoints.plain_files import STEP_NBYTES, open_plain
from pd_cluster.checkpoints.safetensors_header import read_header
from pd_cluster.checkpoints.weight_files import weight_files
from pd_cluster.errors import ModelError

# safetensors' dtype -> unsigned integers of its size, and the bits that are all set in NaN and infinity only
BITS: dict[str, tuple[np.dtype[Any], int]] = {
    "F64": (np.dtype("<u8"), 0x7FF0000000000000),
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F8_E5M2": (np.dtype("u1"), 0x7C),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
}


def check_finite_files(base: Path, folder: Path) -> None:
    """Raises ModelError if a tensor contains NaN or infinity, but the one of this name in `base` does not."""
    if (found := _not_finite(folder)) and (new := found - _not_finite(base, found)):
        raise ModelError(f"{folder}: {min(new)}: contains NaN or infinity, which the served model's does not")


def _not_finite(folder: Path, names: Container[str] | None = None) -> set[str]:
    """Returns the names of tensors with NaN or infinity, among `names` if given. Raises OSError, ModelError."""
    found = set()
    for file in weight_files(folder):
        with open_plain(file) as stream:
            header = read_header(file, stream)
            for name, entry in header.entries.items():
                if entry["dtype"] in BITS and (names is None or name in names):
                    start, stop = entry["data_offsets"]
                    stream.seek(len(header.data) + start)
                    if _has_bits(stream, stop - start, *BITS[entry["dtype"]]):
                        found.add(name)
    return found


def _has_bits(stream: Any, nbytes: int, kind: np.dtype[Any], bits: int) -> bool:
    """Whether any of the integers in the next bytes of a stream has all these bits."""
    mask = kind.type(bits)
    while nbytes > 0 and (part := stream.read(min(nbytes, STEP_NBYTES))):
        nbytes -= len(part)
        numbers = np.frombuffer(part, kind, len(part) // kind.itemsize)
        if ((numbers & mask) == mask).any():
            return True
    return False
