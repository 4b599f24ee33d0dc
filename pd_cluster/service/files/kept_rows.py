"""Database rows of files and batches: tables, owners, paging."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Any, NamedTuple

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner BLOB, purpose TEXT, name TEXT, nbytes INTEGER, made_s REAL, expires_s REAL, whole INTEGER
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, nbytes);
CREATE INDEX IF NOT EXISTS files_by_expiry ON files (expires_s);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner BLOB, made_s REAL, expires_s REAL, running INTEGER, input TEXT, body BLOB
);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, made_s);
CREATE INDEX IF NOT EXISTS running_batches ON batches (running, made_s);
CREATE INDEX IF NOT EXISTS batches_by_input ON batches (input, running);
CREATE INDEX IF NOT EXISTS batches_by_expiry ON batches (expires_s);
"""


class Paging(NamedTuple):
    """The part of a list to return. `after`: the id of the item before it; "": from the beginning."""

    limit: int
    after: str = ""
    is_ascending: bool = False


def key_of(owner: str) -> bytes:
    return hashlib.sha256(owner.encode()).digest()


def listed(
    connection: sqlite3.Connection, select: str, values: list[Any], paging: Paging
) -> list[tuple[Any, ...]] | None:
    """Returns rows in order of age, one more than `paging` allows if there are more; None for an unknown `after`."""
    direction, sign = ("ASC", ">") if paging.is_ascending else ("DESC", "<")
    if paging.after:
        row = connection.execute(f"SELECT made_s, id FROM ({_with_age(select)}) WHERE id = ?", (*values, paging.after))
        if (place := row.fetchone()) is None:
            return None
        select, values = f"{select} AND (made_s, id) {sign} (?, ?)", [*values, *place]
    asked = f"{select} ORDER BY made_s {direction}, id {direction} LIMIT ?"
    found: list[tuple[Any, ...]] = connection.execute(asked, (*values, paging.limit + 1)).fetchall()
    return found


def _with_age(select: str) -> str:
    _, _, rest = select.partition(" FROM ")
    return f"SELECT made_s, id FROM {rest}"
