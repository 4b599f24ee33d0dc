"""Reads a folder of stored responses directly, without the store."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from pd_cluster.service.answers.response_store import FILE


def bodies_in(folder: Path) -> dict[str, Any]:
    """Returns the responses' bodies by id."""
    if not (folder / FILE).exists():
        return {}
    with contextlib.closing(sqlite3.connect(folder / FILE)) as connection:
        return {name: json.loads(body) for name, body in connection.execute("SELECT id, body FROM responses")}


def ids_in(folder: Path) -> list[str]:
    return sorted(bodies_in(folder))
