"""Stores responses for their clients in an SQLite database, which all API processes of a host share.

A lookup needs the owner and the id: another owner's id is as unknown as one that does not exist. Knows nothing of HTTP
or of a response's contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from pd_cluster.errors import ConfigError, RequestNotFound, called
from pd_cluster.service.concurrency.fair_thread_pool import FairThreadPool
from pd_cluster.service.files.private_database import PrivateDatabase
from pd_cluster.settings.response_settings import KeptResponses

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
ID = re.compile(r"resp_[0-9a-f]{48}")
FILE = "responses.sqlite3"
NUM_THREADS = 4
MOST_EXPIRED = 64  # the most expired responses that a call removes, so that no call takes long
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (owner BLOB, id TEXT, made_s REAL, nbytes INTEGER, body BLOB);
CREATE UNIQUE INDEX IF NOT EXISTS by_id ON responses (owner, id);
CREATE INDEX IF NOT EXISTS by_age ON responses (owner, made_s);
CREATE INDEX IF NOT EXISTS by_time ON responses (made_s);
CREATE TABLE IF NOT EXISTS owners (owner BLOB PRIMARY KEY, nbytes INTEGER) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (NEW.owner, NEW.nbytes) ON CONFLICT DO UPDATE SET nbytes = nbytes + NEW.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE owners SET nbytes = nbytes - OLD.nbytes WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND nbytes <= 0;
END;
"""

Json = dict[str, Any]


class KeptResponse(msgspec.Struct):
    """`items`: all input items of the response, including earlier turns."""

    response: Json
    items: list[Json]

    @property
    def conversation(self) -> list[Json]:
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """`keep`, `find` and `remove` wait for the disk, so an event loop calls them through `on_thread`.

    The cost of a call does not depend on the number of responses. A response expires `ttl_s` after it was stored; each
    `keep` removes some expired responses of all owners.
    """

    def __init__(self, config: KeptResponses, clock: Callable[[], float] = time.time) -> None:
        """Creates the folder, or uses an existing one. Raises ConfigError unless only this user has access to it."""
        self._config, self._clock = config, clock
        self.file = Path(config.folder) / FILE
        self._threads = FairThreadPool(NUM_THREADS, name="responses")
        named = f"{called('response_store')} {config.folder}"
        try:
            self._database = PrivateDatabase(self.file, called("response_store"), SCHEMA)
            while self._expire():
                pass
        except OSError as error:
            raise ConfigError(f"{named}: cannot be used: {error.strerror or error}; give another folder") from None
        except sqlite3.Error as error:
            raise ConfigError(f"{named}: {FILE} cannot be used: {error}; remove it, or give another folder") from None

    async def on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the call on one of the store's own threads, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def keep(self, owner: str, kept: KeptResponse) -> bool:
        """Stores a response under its id. Returns False if it is too large or cannot be written."""
        body, most_nbytes, key = msgspec.json.encode(kept), self._config.tenant_mib << 20, _key(owner)
        if len(body) > most_nbytes:
            return False
        row = (key, kept.response["id"], self._clock(), len(body), body)
        try:
            with self._database.writing() as connection:
                connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
                self._evict_oldest(connection, key, most_nbytes)
            self._expire()
        except sqlite3.Error as error:
            log.error("a response cannot be kept in %s: %s", self.file, error)
            return False
        return True

    def find(self, owner: str, response_id: str) -> KeptResponse:
        """Returns an owner's response. Raises RequestNotFound for an unknown or expired id."""
        asked = "SELECT body FROM responses WHERE owner = ? AND id = ? AND made_s > ?"
        since_s = self._clock() - self._config.ttl_s
        with contextlib.suppress(sqlite3.Error, msgspec.MsgspecError):
            row = self._database.connection.execute(asked, (_key(owner), response_id, since_s)).fetchone()
            if row is not None:
                return msgspec.json.decode(row[0], type=KeptResponse)
        raise not_found(response_id)

    def remove(self, owner: str, response_id: str) -> None:
        """Removes a response. Raises RequestNotFound like `find`."""
        self.find(owner, response_id)
        with contextlib.suppress(sqlite3.Error), self._database.writing() as connection:
            asked = "DELETE FROM responses WHERE owner = ? AND id = ?"
            if connection.execute(asked, (_key(owner), response_id)).rowcount:
                return
        raise not_found(response_id)

    def close(self) -> None:
        """Closes the calling thread's connection to the file."""
        self._database.close()

    def _evict_oldest(self, connection: sqlite3.Connection, key: bytes, most_nbytes: int) -> None:
        """Removes an owner's oldest responses until the rest fits."""
        oldest = "SELECT rowid FROM responses WHERE owner = ? ORDER BY made_s, rowid LIMIT 1"
        while connection.execute("SELECT nbytes FROM owners WHERE owner = ?", (key,)).fetchone()[0] > most_nbytes:
            connection.execute(f"DELETE FROM responses WHERE rowid = ({oldest})", (key,))

    def _expire(self) -> int:
        """Removes some expired responses of all owners; returns how many. Raises sqlite3.Error."""
        expired = "SELECT rowid FROM responses WHERE made_s <= ? ORDER BY made_s LIMIT ?"
        bounds = (self._clock() - self._config.ttl_s, MOST_EXPIRED)
        if self._database.connection.execute(expired, bounds).fetchone() is None:
            return 0
        with self._database.writing() as connection:
            return connection.execute(f"DELETE FROM responses WHERE rowid IN ({expired})", bounds).rowcount


def not_found(response_id: str) -> RequestNotFound:
    shown = response_id if ID.fullmatch(response_id) else "of this form"
    return RequestNotFound(
        f"there is no response {shown}; it may have expired, or belong to another key", code="response_not_found"
    )


def _key(owner: str) -> bytes:
    return hashlib.sha256(owner.encode()).digest()
