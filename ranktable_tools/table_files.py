"""Reads and writes rank table files: bounded, strict JSON, atomically, with a mode and a group. Knows no fields."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ranktable_tools.errors import MISSING, RankTableError
from ranktable_tools.file_owners import owner_of, reader

MAX_TABLE_NBYTES: Final = 16 * 1024 * 1024
_FILE: Final = "(file)"


class Access(NamedTuple):
    """The permissions of a written file: its mode, and its group's number."""

    mode: int = 0o600
    group_id: int | None = None


PRIVATE: Final = Access()


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def actual_path(path: str | os.PathLike[str]) -> Path:
    """Returns `path`, or its other spelling if only a file of that name exists. In the reference document, shell lines
    have `local_rank_table_…`, but the tool writes `local_ranktable_…`.
    """
    asked = Path(path)
    if os.path.lexists(asked):
        return asked
    for one, other in (("rank_table", "ranktable"), ("ranktable", "rank_table")):
        renamed = asked.with_name(asked.name.replace(one, other)) if asked.name else asked
        if os.path.exists(renamed):
            return renamed
    return asked


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a table file, under either spelling of its name. Raises RankTableError."""
    file = actual_path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_TABLE_NBYTES + 1)
    except FileNotFoundError:
        raise RankTableError(str(path), _FILE, MISSING, "a rank table", "write one with `pd-ranktable gen`") from None
    except PermissionError:
        group = os.getegid()
        way_out = f"its owner: chgrp {group} {file} && chmod 640 {file}, or write it with --group {group}"
        raise RankTableError(str(path), _FILE, owner_of(file), f"a table that {reader()} may read", way_out) from None
    except (OSError, ValueError) as error:
        raise RankTableError(str(path), _FILE, str(error), "a readable file") from None
    if len(data) > MAX_TABLE_NBYTES:
        raise RankTableError(str(file), _FILE, f"over {MAX_TABLE_NBYTES} bytes", "a rank table of at most 16 MiB")
    return data


def read_json(path: str | os.PathLike[str]) -> object:
    """Returns the JSON value of a table file; refuses duplicate keys. Raises RankTableError."""
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
    except (RecursionError, ValueError) as error:  # too deep nesting; an integer of thousands of digits
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
    """Writes `path` as `write_file` does, readable only by its owner."""
    return write_file(path, text, PRIVATE)


def write_file(path: Path, text: str, access: Access) -> Path:
    """Writes `path` atomically.

    Readers see the old file or the new one. Raises OSError, also if the group cannot be set.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OSError(
            f"{path}: {error.strerror}; user {os.getuid()} needs write access to the folder; grant it, or name "
            "another folder"
        ) from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            if access.group_id is not None:
                _give(stream.fileno(), path, access.group_id)
            os.fchmod(stream.fileno(), access.mode)  # independent of the umask
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _give(descriptor: int, path: Path, group_id: int) -> None:
    try:
        os.fchown(descriptor, -1, group_id)
    except OSError as error:
        raise OSError(
            f"{path}: --group {group_id}: {error.strerror}; run as root or as a member of that group, or leave it out"
        ) from None


def is_private(path: str | os.PathLike[str]) -> bool:
    """Returns whether only the owner may write the file, and only the owner and its group may read it."""
    return not actual_path(path).stat().st_mode & 0o027
