"""Reads the header of a safetensors file, and checks it against the file's size before any tensor is read.

Format: 8 bytes of the header's length, the header as JSON, the tensors' bytes in one piece to the end of the file, as
https://github.com/huggingface/safetensors#format describes it. Knows nothing of what tensors are for.
"""

from __future__ import annotations

import os
import reprlib
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pd_cluster.errors import ModelError

MAX_HEADER_NBYTES = 100 << 20  # the limit of safetensors itself
MAX_TENSORS = 1 << 20
MARKS_OF_TENSOR = {b":": 4, b",": 5}  # mark -> its number in a tensor's entry, including the comma after the entry
MARKS_OF_METADATA = 4096
PREFIX_NBYTES = 8
MAX_NAME = 300  # characters of a name in errors
AGAIN = "copy or download it again"


class Header(NamedTuple):
    """`data`: the bytes before the tensors. `entries`: dtype, shape and data_offsets, by tensor name."""

    data: bytes
    entries: dict[str, dict[str, Any]]
    file_nbytes: int


def read_header(
    file: Path, stream: Any, most_nbytes: int = MAX_HEADER_NBYTES, most_tensors: int = MAX_TENSORS
) -> Header:
    """Reads from the file's start. Raises ModelError unless the tensors fill exactly the rest of the file."""
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(PREFIX_NBYTES)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == PREFIX_NBYTES else size
    if length > size - PREFIX_NBYTES:
        raise ModelError(f"{file}: not a safetensors file (its header does not fit the file); {AGAIN}")
    if length > most_nbytes:
        raise ModelError(f"{file}: a header of {length} bytes; at most {most_nbytes} are read")
    data = stream.read(length)
    for mark, number in MARKS_OF_TENSOR.items():  # decoding all of it at once would hold the interpreter's lock
        if (found := data.count(mark)) > number * most_tensors + MARKS_OF_METADATA:
            what = f"a header with {found} times {mark.decode()!r}"
            raise ModelError(f"{file}: {what}; at most {most_tensors} tensors are read")
    try:
        given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        given.pop("__metadata__", None)
        entries: dict[str, dict[str, Any]] = {name: msgspec.json.decode(entry) for name, entry in given.items()}
        spans = sorted((*_span(entry["data_offsets"]), name) for name, entry in entries.items())
        for entry in entries.values():
            entry["dtype"], entry["shape"]
    except (ValueError, RecursionError, LookupError, TypeError, msgspec.DecodeError):
        raise ModelError(f"{file}: not a safetensors file (its header is not the JSON of such a file)") from None
    _check_spans(file, spans, size - PREFIX_NBYTES - length)
    return Header(prefix + data, entries, size)


def _span(offsets: Any) -> tuple[int, int]:
    """Raises TypeError, ValueError."""
    start, stop = offsets
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise ValueError(f"data_offsets {reprlib.repr(offsets)}")
    return start, stop


def _check_spans(file: Path, spans: list[tuple[int, int, str]], data_nbytes: int) -> None:
    """Raises ModelError."""
    at = 0
    for start, stop, name in spans:
        if start != at:
            what = "overlaps another tensor" if start < at else f"follows {start - at} bytes that no tensor has"
            raise ModelError(f"{file}: {name[:MAX_NAME]!r}: {what}; {AGAIN}")
        at = stop
    if at > data_nbytes:
        raise ModelError(
            f"{file}: cut short: its header describes {at} bytes of weights, but it has {data_nbytes}; {AGAIN}"
        )
    if at < data_nbytes:
        raise ModelError(f"{file}: {data_nbytes - at} bytes follow its last tensor; {AGAIN}")
