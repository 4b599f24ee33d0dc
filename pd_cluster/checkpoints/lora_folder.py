"""Reads a folder with a LoRA adapter in PEFT's format, without torch: what it would change, and its identity.

The folder is somebody else's: nothing outside it is read, sizes are bounded before anything is allocated, and every
tensor of the file is either a part of the adapter or an error that names it. Whether the parts fit a model is
model/lora's to say.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import reprlib
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.checkpoints.lora_config import LoraSettings, modules_to_save, read_settings
from pd_cluster.checkpoints.lora_tensors import LoraTensors, Stored, shown, sorted_tensors
from pd_cluster.errors import ModelError, called

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
UNSAFE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MAX_CONFIG_NBYTES = 1 << 20
MAX_HEADER_NBYTES = 16 << 20
MAX_WEIGHTS_NBYTES = 8 << 30
MAX_TENSORS = 1 << 16
# A tensor's entry has four colons and five commas with that behind it; the rest is for __metadata__.
MOST_OF_HEADER = {b":": 4 * MAX_TENSORS + 4096, b",": 5 * MAX_TENSORS + 4096}
NBYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of a number, by safetensors' name of the dtype
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
EXPERTS_TENSORS = ("gate_up_proj", "down_proj")  # transformers' names


@dataclass(frozen=True, slots=True)
class LoraFolder:
    """`digest` (64 hex digits) identifies settings and weights."""

    path: Path
    settings: LoraSettings
    tensors: LoraTensors
    digest: str

    @property
    def file(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def max_rank(self) -> int:
        """The highest rank of a module."""
        tensors, rank_of = self.tensors, self.settings.rank_of
        ranks = [pair.rank for pair in (*tensors.modules.values(), *tensors.embeddings.values())]
        ranks += [rank_of(f"{name}.{tensor}") for name in tensors.experts for tensor in EXPERTS_TENSORS]
        return max(ranks, default=1)

    @classmethod
    def read(cls, path: Path, max_rank: int) -> LoraFolder:
        """Reads all but the numbers. Raises ModelError that names the file, and the field or tensor."""
        config = path / CONFIG_FILE
        if not path.is_dir():
            raise ModelError(f"{path}: no such folder")
        with opened(path, CONFIG_FILE, MAX_CONFIG_NBYTES) as stream:
            data = stream.read(MAX_CONFIG_NBYTES + 1)
        settings, saved = read_settings(config, data), modules_to_save(config, data)
        if not (path / WEIGHTS_FILE).exists() and (found := [name for name in UNSAFE_FILES if (path / name).exists()]):
            raise ModelError(
                f"{path / found[0]}: such files may run code when they are read; save it as {WEIGHTS_FILE}"
            )
        file = path / WEIGHTS_FILE
        with opened(path, WEIGHTS_FILE, MAX_WEIGHTS_NBYTES) as stream:
            size = os.fstat(stream.fileno()).st_size
            stored = stored_tensors(file, stream, size)
            stream.seek(0)
            digest = hashlib.sha256(msgspec.json.encode(settings) + b"\0")
            if digest_file(stream, digest) != size:
                raise ModelError(f"{file}: changed while it was read; load it again")
        tensors = sorted_tensors(file, stored, saved)
        _check(file, settings, tensors, max_rank)
        return cls(path, settings, tensors, digest.hexdigest())

    def weights(self) -> bytes:
        """Returns the whole file. Raises ModelError if it is no longer the one that `read` saw."""
        with opened(self.path, WEIGHTS_FILE, MAX_WEIGHTS_NBYTES) as stream:
            data: bytes = stream.read()
        if hashlib.sha256(msgspec.json.encode(self.settings) + b"\0" + data).hexdigest() != self.digest:
            raise ModelError(f"{self.file}: changed while it was loaded; load it again")
        return data


def opened(folder: Path, name: str, most_nbytes: int) -> Any:
    """Opens a plain file of the folder. Raises ModelError.

    A symbolic link may lead to another file of the folder, or from a snapshot of the hub's cache to its blobs.
    """
    file = folder / name
    try:
        target, home = file.resolve(strict=True), folder.resolve(strict=True)
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if target.parent not in (home, blobs):
            raise ModelError(f"{file}: leads out of its folder; copy the file itself there")
        stream = os.fdopen(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        raise ModelError(f"{file}: missing; a LoRA adapter has {CONFIG_FILE} and {WEIGHTS_FILE}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ModelError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = os.fstat(stream.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size > most_nbytes:
        stream.close()
        what = f"{found.st_size} bytes; at most {most_nbytes} are read" if stat.S_ISREG(found.st_mode) else "not a file"
        raise ModelError(f"{file}: {what}")
    return stream


def digest_file(stream: Any, digest: Any) -> int:
    """Digests a file to its end; returns its size."""
    size = 0
    while part := stream.read(1 << 20):
        digest.update(part)
        size += len(part)
    return size


def stored_tensors(file: Path, stream: Any, size: int) -> dict[str, Stored]:
    """Reads the header: the file's tensors by name. Raises ModelError."""
    prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > size - 8:
        raise ModelError(f"{file}: not a whole safetensors file; copy or download it again")
    if length > MAX_HEADER_NBYTES:
        raise ModelError(f"{file}: a header of {length} bytes; at most {MAX_HEADER_NBYTES} are read")
    header = stream.read(length)
    for mark, most in MOST_OF_HEADER.items():  # decoding all of it at once would hold the interpreter
        if (number := header.count(mark)) > most:
            what = f"a header with {number} times {mark.decode()!r}"
            raise ModelError(f"{file}: {what}; at most {MAX_TENSORS} tensors are read")
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        found = {name: msgspec.json.decode(entry, type=_Written) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ModelError(f"{file}: not a safetensors file (its header is not the JSON of one)") from None
    if not 0 < len(found) <= MAX_TENSORS:
        raise ModelError(f"{file}: {len(found)} tensors; expected 1 to {MAX_TENSORS}")
    return {
        name: _entry(f"{file}: {shown(name)}", each.dtype, each.shape, each.data_offsets, 8 + length, size)
        for name, each in found.items()
    }


class _Written(msgspec.Struct):
    """A tensor as a header describes it; `_entry` checks the values."""

    dtype: Any
    shape: Any
    data_offsets: Any


def _entry(place: str, dtype: Any, shape: Any, offsets: Any, first: int, size: int) -> Stored:
    if dtype not in NBYTES:
        raise ModelError(f"{place}: dtype {reprlib.repr(dtype)}; expected one of {', '.join(NBYTES)}")
    if not (_are_counts(shape, 1) or _are_counts(shape, 2)) or min(shape) < 1:
        raise ModelError(f"{place}: shape {reprlib.repr(shape)}; expected a matrix")
    if not _are_counts(offsets, 2) or offsets[1] - offsets[0] != math.prod(shape) * NBYTES[dtype]:
        raise ModelError(f"{place}: its place {reprlib.repr(offsets)} does not have the size of its shape {shape}")
    if first + offsets[1] > size:
        raise ModelError(f"{place}: cut short; copy or download the file again")
    return Stored(dtype, tuple(shape), first + offsets[0], first + offsets[1])


def _are_counts(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def _check(file: Path, settings: LoraSettings, tensors: LoraTensors, max_rank: int) -> None:
    """Checks ranks and layers against the settings. Raises ModelError."""
    for name, pair in (*tensors.modules.items(), *tensors.embeddings.items()):
        _check_module(file, settings, name, pair.rank, max_rank)
        if (wanted := settings.rank_of(name)) != pair.rank:
            raise ModelError(f"{file}: {name}: rank {pair.rank}, but {CONFIG_FILE} has {wanted} (r, rank_pattern)")
    for name, pairs in tensors.experts.items():
        if len(pairs) > len(EXPERTS_TENSORS):
            raise ModelError(f"{file}: {name}: {len(pairs)} pairs of matrices; experts have {len(EXPERTS_TENSORS)}")
        for tensor in EXPERTS_TENSORS:  # which pair is whose shows when they are placed
            _check_module(file, settings, f"{name}.{tensor}", settings.rank_of(f"{name}.{tensor}"), max_rank)


def _check_module(file: Path, settings: LoraSettings, name: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise ModelError(f"{file}: {name}: rank {rank} is above {called('max_lora_rank')} {max_rank}; raise that")
    layer = LAYER.search(name)
    if settings.layers is not None and (layer is None or int(layer[1]) not in settings.layers):
        raise ModelError(f"{file}: {name}: layers_to_transform of {CONFIG_FILE} does not have its layer")
