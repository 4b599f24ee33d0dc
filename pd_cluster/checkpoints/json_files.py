"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Returns a file's object. Raises ModelError that names the file."""
    try:
        value = json.loads(read_plain(path))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: missing; the model folder needs config.json, tokenizer.json, *.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value
