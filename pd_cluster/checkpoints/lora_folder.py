"""Reads a LoRA adapter's folder in PEFT's format, without torch: which modules it changes, and its identity.

The folder is untrusted: no file outside of it is read, and sizes are checked before memory is allocated. A tensor that
is not part of the adapter is an error that names it. The package model/lora checks whether the parts fit a model.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.checkpoints.lora_config import LoraSettings, modules_to_save, read_settings
from pd_cluster.checkpoints.lora_tensors import LoraTensor, LoraTensors, shown, sorted_tensors
from pd_cluster.checkpoints.plain_files import digest_file, open_plain, read_digested
from pd_cluster.checkpoints.safetensors_header import read_header
from pd_cluster.errors import ModelError, called

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
UNSAFE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MAX_CONFIG_NBYTES = 1 << 20
MAX_HEADER_NBYTES = 16 << 20
MAX_WEIGHTS_NBYTES = 8 << 30
MAX_TENSORS = 1 << 16
NBYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per element, by safetensors' dtype
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
EXPERTS_TENSORS = ("gate_up_proj", "down_proj")  # transformers' names


@dataclass(frozen=True, slots=True)
class LoraFolder:
    """`digest` (64 hex digits) identifies the settings and weights. `file_nbytes`: the size of the weight file."""

    path: Path
    settings: LoraSettings
    tensors: LoraTensors
    digest: str
    file_nbytes: int

    @property
    def file(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def max_rank(self) -> int:
        """The highest rank of any module."""
        tensors, rank_of = self.tensors, self.settings.rank_of
        ranks = [pair.rank for pair in (*tensors.modules.values(), *tensors.embeddings.values())]
        ranks += [rank_of(f"{name}.{tensor}") for name in tensors.experts for tensor in EXPERTS_TENSORS]
        return max(ranks, default=1)

    @classmethod
    def read(cls, path: Path, max_rank: int) -> LoraFolder:
        """Reads everything except the values. Raises ModelError that names the file, and the field or tensor."""
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
            stored, size = stored_tensors(file, stream)
            tensors = sorted_tensors(file, stored, saved)
            _check(file, settings, tensors, max_rank)
            stream.seek(0)
            digest = _digest_of(settings)
            if digest_file(stream, digest) != size:
                raise ModelError(f"{file}: changed while it was read; load it again")
        return cls(path, settings, tensors, digest.hexdigest(), size)

    def weights(self) -> mmap.mmap:
        """Returns the whole file. Raises ModelError if it changed since `read`."""
        with opened(self.path, WEIGHTS_FILE, self.file_nbytes) as stream:
            data = read_digested(stream, self.file_nbytes, digest := _digest_of(self.settings))
        if digest.hexdigest() != self.digest:
            raise ModelError(f"{self.file}: changed while it was loaded; load it again")
        return data


def _digest_of(settings: LoraSettings) -> Any:
    """Returns a digest object that has already digested the settings."""
    return hashlib.sha256(msgspec.json.encode(settings) + b"\0")


def opened(folder: Path, name: str, most_nbytes: int) -> Any:
    """Opens a regular file of the folder. Raises ModelError.

    A symbolic link may lead to another file of the folder or, in a snapshot of the hub's cache, to the cache's blobs.
    """
    file = folder / name
    try:
        target, home = file.resolve(strict=True), folder.resolve(strict=True)
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if target.parent not in (home, blobs):
            raise ModelError(f"{file}: leads out of its folder; copy the file itself there")
        return open_plain(target, most_nbytes, os.O_NOFOLLOW)
    except FileNotFoundError:
        raise ModelError(f"{file}: missing; a LoRA adapter has {CONFIG_FILE} and {WEIGHTS_FILE}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ModelError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def stored_tensors(file: Path, stream: Any) -> tuple[dict[str, LoraTensor], int]:
    """Reads the header: the file's tensors by name, and its size. Raises ModelError."""
    header = read_header(file, stream, MAX_HEADER_NBYTES, MAX_TENSORS)
    if not 0 < len(header.entries) <= MAX_TENSORS:
        raise ModelError(f"{file}: {len(header.entries)} tensors; expected 1 to {MAX_TENSORS}")
    found = {
        name: _entry(f"{file}: {shown(name)}", each["dtype"], each["shape"], each["data_offsets"], len(header.data))
        for name, each in header.entries.items()
    }
    return found, header.file_nbytes


def _entry(place: str, dtype: Any, shape: Any, offsets: Any, first: int) -> LoraTensor:
    if dtype not in NBYTES:
        raise ModelError(f"{place}: dtype {reprlib.repr(dtype)}; expected one of {', '.join(NBYTES)}")
    if not (_are_counts(shape, 1) or _are_counts(shape, 2)) or min(shape) < 1:
        raise ModelError(f"{place}: shape {reprlib.repr(shape)}; expected a matrix")
    if not _are_counts(offsets, 2) or offsets[1] - offsets[0] != math.prod(shape) * NBYTES[dtype]:
        raise ModelError(f"{place}: data_offsets {reprlib.repr(offsets)} do not match the size of its shape {shape}")
    return LoraTensor(dtype, tuple(shape), first + offsets[0], first + offsets[1])


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
        for tensor in EXPERTS_TENSORS:  # later code decides which pair belongs to which tensor
            _check_module(file, settings, f"{name}.{tensor}", settings.rank_of(f"{name}.{tensor}"), max_rank)


def _check_module(file: Path, settings: LoraSettings, name: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise ModelError(f"{file}: {name}: rank {rank} is above {called('max_lora_rank')} {max_rank}; raise that")
    layer = LAYER.search(name)
    if settings.layers is not None and (layer is None or int(layer[1]) not in settings.layers):
        raise ModelError(f"{file}: {name}: layers_to_transform of {CONFIG_FILE} does not list its layer")
