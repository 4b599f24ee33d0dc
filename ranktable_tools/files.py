"""Rank table files on disk: bounded reading, strict JSON, private atomic writing. Knows no field."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ranktable_tools.errors import MISSING, RankTableError

MAX_TABLE_NBYTES: Final = 16 * 1024 * 1024
_FILE: Final = "(file)"
_PRIVATE: Final = 0o600


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def actual_path(path: str | os.PathLike[str]) -> Path:
    """`path`, or its other spelling when only that one exists: the reference document's shell lines say
    `local_rank_table_…`, its tool writes `local_ranktable_…`."""
    asked = Path(path)
    if os.path.lexists(asked):
        return asked
    for one, other in (("rank_table", "ranktable"), ("ranktable", "rank_table")):
        renamed = asked.with_name(asked.name.replace(one, other)) if asked.name else asked
        if os.path.exists(renamed):
            return renamed
    return asked


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a table file, under either spelling of its name. Raises RankTableError."""
    file = actual_path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_TABLE_NBYTES + 1)
    except FileNotFoundError:
        raise RankTableError(str(path), _FILE, MISSING, "a rank table", "write one with `pd-ranktable gen`") from None
    except (OSError, ValueError) as error:
        raise RankTableError(str(path), _FILE, str(error), "a readable file") from None
    if len(data) > MAX_TABLE_NBYTES:
        raise RankTableError(str(file), _FILE, f"over {MAX_TABLE_NBYTES} bytes", "a rank table of at most 16 MiB")
    return data


def read_json(path: str | os.PathLike[str]) -> object:
    """The JSON value of a table file; a key given twice is refused. Raises RankTableError."""
    data, file = read_bytes(path), str(actual_path(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RankTableError(file, f"byte {error.start}", data[error.start], "UTF-8 text") from None
    try:
        value: object = json.loads(text, object_pairs_hook=_object_of_unique_keys)
    except _DuplicateKey as error:
        raise RankTableError(file, error.key, "the same key twice in one object", "each key once") from None
    except json.JSONDecodeError as error:
        place, found = f"line {error.lineno} column {error.colno}", text[error.pos : error.pos + 20]
        raise RankTableError(file, place, found, f"JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of thousands of digits
        raise RankTableError(file, _FILE, str(error), "the JSON of a rank table") from None
    return value


def _object_of_unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(key)
        found[key] = value
    return found


def write_private(path: Path, text: str) -> Path:
    """Write `path` at once and whole, mode 0600: the cluster's secret is derived from these bytes.

    Readers see the old file or the new one. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def is_private(path: str | os.PathLike[str]) -> bool:
    """Nobody but the owner may read or write the file."""
    return not actual_path(path).stat().st_mode & 0o077
