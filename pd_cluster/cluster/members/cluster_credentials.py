"""Reads the secrets of a cluster's members from the files that pd-ranktable writes next to the global rank table.

With --derive-secret, derives all of them from the table instead: only for a single host whose users are all trusted.
Knows nothing of connections.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from pd_cluster import extra_table
from pd_cluster.cluster.members.rank_table_place import Place, digest_of, spans_hosts, table_path
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import KeyFiles
from ranktable_tools import RankTable, load_global
from ranktable_tools.cluster_keys import (
    ADMIN_TOKEN_FILE,
    SCHEDULER_KEY_FILE,
    SECRET_FILE,
    read_scheduler_key,
    read_secret,
    read_token,
    refuse_foreign_key,
)
from ranktable_tools.public_keys import public_key
from ranktable_tools.schema import RankTableError, read_bytes

T = TypeVar("T")
PURPOSES = {"secret": b"secret 1", "key": b"scheduler key 1", "token": b"admin token 1"}


def credentials_of(place: Place, files: KeyFiles) -> Credentials:
    """Returns this process's credentials. Raises ConfigError."""
    if files.node_key or files.trusted_nodes:
        flag = called("node_key_file" if files.node_key else "trusted_nodes")
        extra_table.load(extra_table.NODE_FILES_CHECK, flag)(files, is_worker=place.role != "scheduler")
    named = {"node_key_file": files.node_key, "trusted_nodes": files.trusted_nodes}
    return msgspec.structs.replace(_cluster_credentials(place, files), **named)


def _cluster_credentials(place: Place, files: KeyFiles) -> Credentials:
    if not place.table.file:
        _refuse_unnamed(place, files)
    table = digest_of(place.table) if place.table.file else b""
    if files.derives:
        given = {"--secret-file": files.secret, "--scheduler-key-file": files.scheduler_key}
        for flag in [flag for flag, file in given.items() if file is not None]:
            raise ConfigError(
                f"{flag} {given[flag]}: requires a cluster.secret, and cannot be combined with --derive-secret; drop "
                "one of the two"
            )
        secret, key = (_derived(place.table, purpose) for purpose in ("secret", "key"))
        return Credentials(secret, (public_key(key),), key if place.role == "scheduler" else b"", table)
    secret_file, known = _read(place.folder, "--secret-file", files.secret, SECRET_FILE, read_secret)
    if place.role != "scheduler":
        return Credentials(known.secret, known.schedulers, table=table)
    flag = "--scheduler-key-file"
    key_file, key = _read(place.folder, flag, files.scheduler_key, SCHEDULER_KEY_FILE, read_scheduler_key)
    try:
        refuse_foreign_key(key, key_file, known, secret_file)
    except RankTableError as error:
        raise ConfigError(str(error)) from None
    return Credentials(known.secret, known.schedulers, key, table)


def _refuse_unnamed(place: Place, files: KeyFiles) -> None:
    """Raises ConfigError if a file is not named: without a table there is no default folder."""
    if files.derives:
        raise ConfigError("--derive-secret: derives the secret from a rank table, but --role reads none; drop one flag")
    needed = {"--secret-file": (files.secret, SECRET_FILE)}
    if place.role == "scheduler":
        needed["--scheduler-key-file"] = files.scheduler_key, SCHEDULER_KEY_FILE
        needed["--admin-token-file"] = files.admin_token, ADMIN_TOKEN_FILE
    for flag, (given, name) in needed.items():
        if given is None:
            raise ConfigError(
                f"{flag}: --role {place.role} requires it, because without a rank table {name} has no default "
                "folder; `pd-ranktable keys --save-dir FOLDER` writes the three files"
            )


def admin_token_of(place: Place, files: KeyFiles) -> str:
    """Returns the scheduler's admin token. Raises ConfigError."""
    if files.derives and files.admin_token is None:
        return _derived(place.table, "token").hex()
    return _read(place.folder, "--admin-token-file", files.admin_token, ADMIN_TOKEN_FILE, read_token)[1]


def find_admin_token(env: Mapping[str, str], file: str) -> str:
    """Finds the token for a process that is not an instance; "" if no setting leads to one. Raises ConfigError.

    If a one-host table has none of the files next to it, the token is derived from the table.
    """
    if file:
        return read_admin_token(file)
    if not env.get("GLOBAL_RANK_TABLE_FILE_PATH"):
        return ""
    path = table_path(env)
    if any(os.path.exists(path.parent / name) for name in (ADMIN_TOKEN_FILE, SECRET_FILE)):
        return _read(path.parent, "--admin-token-file", None, ADMIN_TOKEN_FILE, read_token)[1]
    try:
        table = load_global(path)
    except RankTableError as error:
        raise ConfigError(str(error)) from None
    return "" if spans_hosts(table) else _derived(table, "token").hex()


def read_admin_token(file: str) -> str:
    """Reads the token. Raises ConfigError that names --admin-token-file."""
    return _read(Path(), "--admin-token-file", file, ADMIN_TOKEN_FILE, read_token)[1]


def _read(folder: Path, flag: str, given: str | None, name: str, read: Callable[[Path], T]) -> tuple[Path, T]:
    file = Path(given) if given is not None else folder / name
    if given is None and not os.path.exists(file):
        goes_to = "every host" if name == SECRET_FILE else "the scheduler's host"
        derived = "; or use --derive-secret, if every user of this single host is trusted"
        raise ConfigError(
            f"{file}: no such file; `pd-ranktable gen` or `merge` writes it next to the global rank table: copy it to "
            f"{goes_to} (for a table without one, run `pd-ranktable keys --save-dir {folder}` on one host), or name "
            f"it with {flag} FILE{derived if name == SECRET_FILE else ''}"
        )
    try:
        return file, read(file)
    except RankTableError as error:
        raise ConfigError(f"{flag} {error}" if given is not None else str(error)) from None


def _derived(table: RankTable, purpose: str) -> bytes:
    if spans_hosts(table):
        servers = [each for each in (table.scheduler, *table.instances) if each is not None]
        hosts = ", ".join(dict.fromkeys(each.server_ip for each in servers))
        raise ConfigError(
            f"--derive-secret: {table.file} has several hosts ({hosts}), and a derived secret is only for a single "
            f"host; copy the {SECRET_FILE} that `pd-ranktable merge` writes to each of them"
        )
    try:
        content = read_bytes(table.file)
    except RankTableError as error:
        raise ConfigError(str(error)) from None
    return hmac.digest(b"pd-cluster from rank table: " + PURPOSES[purpose], content, "sha256")
