"""Writes and reads, next to the global rank table, the three files that make a table's processes one cluster.

`cluster.secret` is for every host: a random secret, and the public key of each scheduler. `scheduler.key` and
`admin.token` are only for the scheduler's host: a private key of 32 random bytes, and the token for commands at the
admin port. No error shows their content.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ranktable_tools.errors import MISSING, RankTableError
from ranktable_tools.file_owners import owner_of, reader
from ranktable_tools.host_addresses import host_key
from ranktable_tools.public_keys import KEY_NBYTES, public_key
from ranktable_tools.table_files import Access, write_file
from ranktable_tools.table_types import RankTable

SECRET_FILE: Final = "cluster.secret"
SCHEDULER_KEY_FILE: Final = "scheduler.key"
ADMIN_TOKEN_FILE: Final = "admin.token"
MIN_TOKEN_NBYTES: Final = 16
_MAX_NBYTES: Final = 65536
_FILE: Final = "(file)"
_HEX_KEY: Final = "64 hexadecimal digits"
_MAKE_NEW: Final = "`pd-ranktable keys` writes a new set of the three files"


class ClusterSecret(NamedTuple):
    """The content of `cluster.secret`: 32 bytes each. `schedulers` are public keys."""

    secret: bytes
    schedulers: tuple[bytes, ...]


def write_keys(folder: Path, access: Access) -> list[Path]:
    """Writes missing files. Keeps existing ones, because running processes and other hosts also have them.

    Only the owner may read them, and the group, if `access` names one. Raises OSError, NoImplementation before anything
    is written, and RankTableError for files that do not belong together.
    """
    own = Access(access.mode & 0o640, access.group_id) if access.group_id is not None else Access()
    secret_file, key_file, token_file = paths = [
        folder / name for name in (SECRET_FILE, SCHEDULER_KEY_FILE, ADMIN_TOKEN_FILE)
    ]
    is_known = os.path.lexists(secret_file)
    if is_known and not os.path.lexists(key_file):
        raise RankTableError(
            str(key_file),
            _FILE,
            MISSING,
            f"the private key that {secret_file} names",
            f"restore it from the scheduler's host, or remove {secret_file} to make new files for all hosts",
        )
    if has_key := os.path.lexists(key_file):
        key = read_scheduler_key(key_file)
    else:
        key = secrets.token_bytes(KEY_NBYTES)
    public = public_key(key)
    if not has_key:
        write_file(key_file, key.hex() + "\n", own)
    if is_known:
        refuse_foreign_key(key, key_file, read_secret(secret_file), secret_file)
    else:
        write_file(secret_file, secret_text(secrets.token_bytes(KEY_NBYTES), [public]), own)
    if not os.path.lexists(token_file):
        write_file(token_file, secrets.token_hex(KEY_NBYTES) + "\n", own)
    return paths


def secret_text(secret: bytes, schedulers: Sequence[bytes]) -> str:
    """Returns the content of a `cluster.secret`; each further scheduler adds a line."""
    lines = ["# For the hosts of this cluster only."]
    return "\n".join([*lines, f"secret {secret.hex()}", *(f"scheduler {key.hex()}" for key in schedulers), ""])


def read_secret(file: Path) -> ClusterSecret:
    """Reads a `cluster.secret`. Raises RankTableError."""
    secret: list[bytes] = []
    schedulers: list[bytes] = []
    for number, line in enumerate(_read(file).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        found = {"secret": secret, "scheduler": schedulers}.get(words[0])
        if found is None or len(words) != 2 or not _is_key(words[1]):
            expected = f"`secret` or `scheduler`, then {_HEX_KEY}"
            raise RankTableError(str(file), f"line {number}", _Hidden(), expected, _MAKE_NEW)
        found.append(bytes.fromhex(words[1]))
    if len(secret) != 1:
        raise RankTableError(str(file), "secret", f"{len(secret)} lines", "exactly one", _MAKE_NEW)
    if not schedulers:
        raise RankTableError(str(file), "scheduler", "no line", "the public key of each scheduler", _MAKE_NEW)
    return ClusterSecret(secret[0], tuple(schedulers))


def read_scheduler_key(file: Path) -> bytes:
    """Returns the private key. Raises RankTableError."""
    text = _read(file).strip()
    if not _is_key(text):
        raise RankTableError(str(file), _FILE, _Hidden(), _HEX_KEY, _MAKE_NEW)
    return bytes.fromhex(text)


def read_token(file: Path) -> str:
    """Returns the admin token. Raises RankTableError."""
    token = _read(file).strip()
    if len(token) < MIN_TOKEN_NBYTES:
        raise RankTableError(str(file), _FILE, f"{len(token)} characters", f"at least {MIN_TOKEN_NBYTES} bytes")
    if not all("!" <= character <= "~" for character in token):
        raise RankTableError(str(file), _FILE, _Hidden(), "letters, digits and signs, without spaces")
    return token


def refuse_foreign_key(key: bytes, key_file: Path, known: ClusterSecret, secret_file: Path) -> None:
    """Raises RankTableError for a scheduler's key that workers with this `cluster.secret` would not accept."""
    if public_key(key) not in known.schedulers:
        raise RankTableError(
            str(key_file),
            _FILE,
            "the key of another cluster",
            f"one whose public key {secret_file} names",
            "copy both files from the folder where they were written together",
        )


def where_to_copy(table: RankTable, table_file: Path) -> list[str]:
    """Returns instructions for people; [] if everything is on one host."""
    assert table.scheduler is not None
    home = table.scheduler.server_ip
    hosts = {host_key(each.server_ip): each.server_ip for each in table.instances}
    others = [host for key, host in hosts.items() if key != host_key(home)]
    if not others:
        return []
    names = f"{table_file.name} and {SECRET_FILE}"
    return [
        f"copy {names} to {', '.join([home, *others])}, into one folder on each, readable only by their owner",
        f"copy {SCHEDULER_KEY_FILE} and {ADMIN_TOKEN_FILE} only to {home}, into the same folder",
    ]


class _Hidden:
    """A placeholder in errors for values that must not be shown."""

    def __repr__(self) -> str:
        return "something else"


def _is_key(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]{64}", text) is not None


def _read(file: Path) -> str:
    """Reads a file. Raises RankTableError, also for a file that other users can read."""
    try:
        with file.open("rb") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            data = stream.read(_MAX_NBYTES)
    except PermissionError:
        expected = f"a file that {reader()} may read"
        way_out = f"its owner: chgrp {os.getegid()} {file} && chmod 640 {file}"
        raise RankTableError(str(file), _FILE, owner_of(file), expected, way_out) from None
    except (OSError, ValueError) as error:
        raise RankTableError(str(file), _FILE, str(getattr(error, "strerror", error)), "a readable file") from None
    if mode & 0o037:
        expected = "a mode with which only its owner and its group"
        raise RankTableError(str(file), _FILE, f"mode {mode:04o}", f"{expected} can read it", f"chmod 600 {file}")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise RankTableError(str(file), _FILE, _Hidden(), "letters, digits and signs", _MAKE_NEW) from None
