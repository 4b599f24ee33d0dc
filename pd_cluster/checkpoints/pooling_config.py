"""Reads, from sentence-transformers' files in a folder, how a checkpoint pools hidden states into one vector.

Without such files, a decoder's vector is the hidden state of the last token, which attends to the whole prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.errors import ModelError
from pd_cluster.types import PoolingKind

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
# Suffixes of module types in modules.json. Vectors are normalized unless a request says otherwise.
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
# Values of "pooling_mode"; older files have a boolean "pooling_mode_…" for each.
KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}
OLD_PREFIX = "pooling_mode_"
OLD_NAMES = {f"{OLD_PREFIX}mean_tokens": "mean", f"{OLD_PREFIX}lasttoken": "lasttoken"}


def pooling_kind_of(folder: Path) -> PoolingKind:
    """Returns the checkpoint's kind of pooling. Raises ModelError for an unsupported kind or a broken file."""
    file = folder / MODULES_FILE
    modules = _read(file) if file.exists() else []
    for module in modules if isinstance(modules, list) else [modules]:
        kind = str(module.get("type", "")) if isinstance(module, dict) else str(module)
        if kind.rpartition(".")[2] not in KNOWN_MODULES:
            raise ModelError(
                f"{file}: module type {kind!r} is not supported; vectors need {', '.join(KNOWN_MODULES)} and no other"
            )
    file = folder / POOLING_FILE
    if not file.exists():
        return "last"
    config = _read(file)
    named = _modes(config) if isinstance(config, dict) else []
    if len(named) != 1 or named[0] not in KINDS:
        raise ModelError(
            f"{file}: pooling_mode {' and '.join(named) or 'missing'} is not supported; it must be one of "
            f"{', '.join(KINDS)}"
        )
    return KINDS[named[0]]


def _modes(config: dict[str, Any]) -> list[str]:
    """Returns the names of the pooling modes that the file enables."""
    if "pooling_mode" in config:
        given = config["pooling_mode"]
        return [str(each) for each in given] if isinstance(given, list) else [str(given)]
    asked = [name for name, value in config.items() if name.startswith(OLD_PREFIX) and value is True]
    return [OLD_NAMES.get(name, name.removeprefix(OLD_PREFIX)) for name in asked]


def _read(file: Path) -> Any:
    try:
        return json.loads(read_plain(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
