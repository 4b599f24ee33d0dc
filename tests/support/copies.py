"""Copies checkpoints and changes their JSON files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def copy_of(folder: Path, to: Path, changes: Mapping[str, Mapping[str, Any]]) -> Path:
    """Returns a copy in the folder `to`. `changes` maps files to changed fields; None removes a field."""
    made = to / "model"
    shutil.copytree(folder, made)
    for name, fields in changes.items():
        file = made / name
        changed = json.loads(file.read_text(encoding="utf-8")) | fields
        kept = {field: value for field, value in changed.items() if value is not None}
        file.write_text(json.dumps(kept), encoding="utf-8")
    return made
