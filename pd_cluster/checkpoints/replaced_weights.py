"""Checks that a folder holds new weights for a model, and identifies them by a digest. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.plain_files import open_plain, read_plain
from pd_cluster.checkpoints.safetensors_header import read_header
from pd_cluster.checkpoints.weight_files import INDEX, QUANTIZERS_FILES, weight_files, whole_digest
from pd_cluster.errors import ModelError

# Fields of config.json that do not affect results.
FREE_FIELDS = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype")
MOST_SHOWN = 3

Stamp = tuple[tuple[str, int, int, int], ...]  # name, size, time of change and inode of each file


def check_replacement(base: Path, folder: Path) -> str:
    """Compares a folder with the model's: config.json, and the names, shapes and dtypes of all tensors.

    Returns a digest of every byte of its weights. Raises ModelError, naming the file, the tensor and both values.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder / 'config.json'}: missing; copy the model's own beside the weights")
    _check_config(base, folder)
    for pattern in QUANTIZERS_FILES:
        ours, theirs = ({file.name: read_plain(file) for file in at.glob(pattern)} for at in (base, folder))
        if ours != theirs:
            raise ModelError(f"{folder / pattern}: differs from the model's; quantize the new weights in the same way")
    _check_tensors(folder, tensors_of(base), tensors_of(folder))
    return whole_digest(folder)


def stamp_of(folder: Path) -> Stamp:
    """Returns a value that changes whenever the weight files change. Raises ModelError."""
    found = []
    for file in weight_files(folder):
        try:
            status = os.stat(file)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}; copy it again") from error
        found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


def version_files(folder: Path) -> list[str]:
    """Returns the names of the files that make up a version: all that `check_replacement` reads. Raises ModelError."""
    found = {file.name for pattern in ("config.json", INDEX, *QUANTIZERS_FILES) for file in folder.glob(pattern)}
    for file in (*folder.glob("*.safetensors"), *weight_files(folder)):
        if file.parent != folder:
            raise ModelError(f"{file}: not beside config.json, so it cannot be sent; put all weights into one folder")
        found.add(file.name)
    if "config.json" not in found:
        raise ModelError(f"{folder / 'config.json'}: missing")
    return sorted(found)


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Maps the name of each tensor to its dtype in safetensors' terms and its shape. Raises ModelError."""
    found = {}
    for file in weight_files(folder):
        try:
            with open_plain(file) as stream:
                entries = read_header(file, stream).entries
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}; copy it again") from error
        for name, entry in entries.items():
            found[name] = str(entry["dtype"]), tuple(entry["shape"])
    return found


def _check_config(base: Path, folder: Path) -> None:
    ours, theirs = (_config_of(at) for at in (base, folder))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise ModelError(
                f"{folder / 'config.json'}: {name} is {theirs.get(name)!r}, but the served model has "
                f"{ours.get(name)!r}; only weights can be replaced"
            )


def _config_of(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in read_json(folder / "config.json").items() if name not in FREE_FIELDS}


def _check_tensors(
    folder: Path, ours: dict[str, tuple[str, tuple[int, ...]]], theirs: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    if missing := ours.keys() - theirs.keys():
        raise ModelError(f"{folder}: {_some(missing)}: missing; an update has all tensors of the model")
    if further := theirs.keys() - ours.keys():
        raise ModelError(f"{folder}: {_some(further)}: not in the served model; leave them out")
    for name, (dtype, shape) in theirs.items():
        if (dtype, shape) != ours[name]:
            wanted = ours[name]
            raise ModelError(
                f"{folder}: {name} is {dtype} {list(shape)}, but the served model has {wanted[0]} {list(wanted[1])}"
            )


def _some(names: Sequence[str] | set[str]) -> str:
    shown = sorted(names)[:MOST_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")
