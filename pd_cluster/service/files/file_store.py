"""Stores owners' files in a private folder: rows in a database, contents next to it.

A file is found only by owner and id, so other owners' ids look unknown. The path is derived from the id, which the
server chooses; the client's file name is only stored as text. Knows nothing of HTTP or of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import msgspec
from msgspec import Meta

from pd_cluster.errors import ConfigError, Refused, RequestError, RequestNotFound, StorageFull, called
from pd_cluster.private_files import CREATE, open_folder, open_own, remove
from pd_cluster.service.concurrency.fair_thread_pool import FairThreadPool
from pd_cluster.service.files.kept_rows import SCHEMA, Paging, key_of, listed
from pd_cluster.service.files.private_database import PrivateDatabase
from pd_cluster.settings.file_settings import KeptFiles

P = ParamSpec("P")
T = TypeVar("T")
Purpose = Literal["batch", "batch_output"]
ID = re.compile(r"file-[0-9a-f]{32}")
DATABASE, CONTENT = "files.sqlite3", "content"
NUM_THREADS = 4
MAX_FILES = 10_000  # per owner
MOST_EXPIRED = 64  # the most expired files that a call removes, so that no call takes long
RESERVED_NBYTES = 16 << 20  # an upload reserves quota in steps of this size
UPLOAD_TIMEOUT_S = 3600.0
FAILING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
COLUMNS = "id, nbytes, made_s, expires_s, name, purpose"
IN_USE = "EXISTS (SELECT 1 FROM batches WHERE input = files.id AND running)"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file as clients see it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: Annotated[int, Meta(description="Unix time in seconds.")]
    expires_at: Annotated[int, Meta(description="When it will be removed.")]
    filename: Annotated[str, Meta(description="The client's name for it.")]
    purpose: Annotated[Purpose, Meta(description="batch_output: the answers or the errors of a batch.")]
    status: Literal["processed"] = "processed"


class QuotaExceeded(RequestError):
    status = 413


@dataclass(slots=True)
class Upload:
    """A file being written. `nbytes`: bytes written. `num_reserved`: bytes counted against the owner's quota."""

    owner: str
    id: str
    fd: int
    nbytes: int = 0
    num_reserved: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # the client may leave during a write


class FileStore:
    """All calls wait for the disk, so event loops use `on_thread`. All raise StorageFull.

    Expired files cannot be read; each new file removes some expired files of all owners. The input of an unfinished
    batch does not expire.
    """

    def __init__(self, config: KeptFiles, clock: Callable[[], float] = time.time) -> None:
        """Creates or opens the folder. Raises ConfigError if other users can access it."""
        self.config, self.clock = config, clock
        self._threads = FairThreadPool(NUM_THREADS, name="files")
        setting, root = called("files_dir"), Path(config.folder)
        try:
            self.database = PrivateDatabase(root / DATABASE, setting, SCHEMA)
            self.content = open_folder(root, CONTENT, setting)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{setting} {root}: cannot be used: {why}; give another folder") from None
        except sqlite3.Error as error:
            raise ConfigError(
                f"{setting} {root}: {DATABASE} cannot be used: {error}; remove it, or give another folder"
            ) from None

    async def on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the call on one of the store's own threads and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def close(self) -> None:
        self.database.close()
        os.close(self.content)

    # ---- uploads

    def begin(self, owner: str, nbytes: int = 0) -> Upload:
        """Begins a file of about this many bytes. Raises QuotaExceeded."""
        self._expire()
        upload = Upload(owner, new_file_id(), -1)
        now_s = self.clock()
        row = (upload.id, key_of(owner), "batch", "", 0, now_s, now_s + UPLOAD_TIMEOUT_S, 0)
        with self.storing(), self.database.writing() as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM files WHERE owner = ?", (key_of(owner),)).fetchone()
            if count >= MAX_FILES:
                raise QuotaExceeded(
                    f"you have {count} files here, which is the limit; delete some", code="quota_exceeded"
                )
            connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        try:
            self._reserve(upload, nbytes, nbytes)
            with self.storing():
                upload.fd = os.open(upload.id, CREATE, 0o600, dir_fd=self.content)
        except BaseException:
            self.discard(upload)
            raise
        return upload

    def write(self, upload: Upload, data: bytes) -> None:
        """Writes a part of an upload. Raises QuotaExceeded, and StorageFull, possibly after a partial write."""
        if (nbytes := upload.nbytes + len(data)) > upload.num_reserved:
            self._reserve(upload, nbytes, nbytes + RESERVED_NBYTES)
        with self.storing(), upload.lock:
            rest = memoryview(data)
            while rest and upload.fd >= 0:
                rest = rest[os.write(upload.fd, rest) :]
        upload.nbytes += len(data)

    def complete(self, upload: Upload, filename: str, ttl_s: float | None) -> FileObject:
        """Ends an upload and publishes its file. `ttl_s` None: the default."""
        now_s = self.clock()
        expires_s = now_s + min(self.config.ttl_s, ttl_s or self.config.ttl_s)
        changes = (filename, upload.nbytes, now_s, expires_s, upload.id)
        with self.storing():
            with upload.lock:
                os.fsync(upload.fd)
                os.close(upload.fd)
                upload.fd = -1
            with self.database.writing() as connection:
                asked = "UPDATE files SET name = ?, nbytes = ?, made_s = ?, expires_s = ?, whole = 1 WHERE id = ?"
                connection.execute(asked, changes)
        return self.find(upload.owner, upload.id)

    def discard(self, upload: Upload) -> None:
        """Removes an unfinished upload now or, if that fails, when it expires."""
        with upload.lock:
            fd, upload.fd = upload.fd, -1
        if fd >= 0:
            os.close(fd)
        remove(self.content, upload.id)
        with contextlib.suppress(sqlite3.Error), self.database.writing() as connection:
            connection.execute("DELETE FROM files WHERE id = ?", (upload.id,))

    def _reserve(self, upload: Upload, least: int, wanted: int) -> None:
        """Reserves at least `least` and at most `wanted` bytes of the owner's quota. Raises QuotaExceeded."""
        with self.storing(), self.database.writing() as connection:
            others = self.num_kept(connection, upload.owner) - upload.num_reserved
            granted = min(wanted, self.quota_nbytes - others)
            if granted < least:
                raise self._exceeded(others)
            connection.execute("UPDATE files SET nbytes = ? WHERE id = ?", (granted, upload.id))
        upload.num_reserved = granted

    @property
    def quota_nbytes(self) -> int:
        return self.config.tenant_mib << 20

    def _exceeded(self, num_kept: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"your files have {num_kept >> 20} MiB of the {self.config.tenant_mib} MiB that each key may keep; "
            f"delete some, or send a smaller file",
            code="quota_exceeded",
        )

    def num_kept(self, connection: sqlite3.Connection, owner: str) -> int:
        """Returns the bytes of all of an owner's files."""
        asked = "SELECT COALESCE(SUM(nbytes), 0) FROM files WHERE owner = ?"
        (found,) = connection.execute(asked, (key_of(owner),)).fetchone()
        return int(found)

    # ---- files

    def find(self, owner: str, file_id: str) -> FileObject:
        """Returns a file. Raises RequestNotFound unless the id is an unexpired file of this owner."""
        asked = f"SELECT {COLUMNS} FROM files WHERE id = ? AND owner = ? AND whole AND (expires_s > ? OR {IN_USE})"
        with self.storing():
            row = self.database.connection.execute(asked, (file_id, key_of(owner), self.clock())).fetchone()
        if row is None:
            raise file_not_found(file_id)
        return _file_of(row)

    def open(self, owner: str, file_id: str) -> tuple[FileObject, int]:
        """Returns a file and a descriptor of its content. Raises RequestNotFound."""
        found = self.find(owner, file_id)
        try:
            return found, open_own(found.id, folder=self.content)
        except FileNotFoundError:
            raise file_not_found(file_id) from None

    def files_of(self, owner: str, purpose: str, paging: Paging) -> list[FileObject]:
        """Returns files by age, one more than `paging` allows if there are more. Raises RequestNotFound for an unknown
        `after`.
        """
        wanted, values = "owner = ? AND whole AND expires_s > ?", [key_of(owner), self.clock()]
        if purpose:
            wanted, values = f"{wanted} AND purpose = ?", [*values, purpose]
        with self.storing():
            rows = listed(self.database.connection, f"SELECT {COLUMNS} FROM files WHERE {wanted}", values, paging)
        if rows is None:
            raise file_not_found(paging.after)
        return [_file_of(row) for row in rows]

    def delete(self, owner: str, file_id: str) -> None:
        """Deletes a file. Raises RequestNotFound, and Refused while an unfinished batch reads it."""
        found = self.find(owner, file_id)
        with self.storing(), self.database.writing() as connection:
            asked = "SELECT id FROM batches WHERE input = ? AND running"
            if (batch := connection.execute(asked, (found.id,)).fetchone()) is not None:
                raise Refused(f"{found.id}: {batch[0]} reads it; cancel that batch first", code="file_in_use")
            remove(self.content, found.id)
            connection.execute("DELETE FROM files WHERE id = ?", (found.id,))

    def _expire(self) -> None:
        """Removes some expired files and batches, of all owners."""
        now_s = self.clock()
        asked = f"SELECT id FROM files WHERE expires_s <= ? AND NOT {IN_USE} LIMIT ?"
        with self.storing():
            rows = self.database.connection.execute(asked, (now_s, MOST_EXPIRED)).fetchall()
            for (file_id,) in rows:  # contents first, because a row without content will be removed next time
                remove(self.content, file_id)
            with self.database.writing() as connection:
                connection.executemany("DELETE FROM files WHERE id = ?", rows)
                connection.execute("DELETE FROM batches WHERE expires_s <= ? AND NOT running", (now_s,))

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Turns disk errors in its block into StorageFull."""
        folder = f"{called('files_dir')} {self.config.folder}"
        try:
            yield
        except OSError as error:
            raise StorageFull(f"{folder}: {error.strerror or error}") from None
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in FAILING:
                raise
            raise StorageFull(f"{folder}: {error}") from None


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def file_not_found(file_id: str) -> RequestNotFound:
    shown = file_id if ID.fullmatch(file_id) else "of this form"
    return RequestNotFound(
        f"there is no file {shown}; it may have expired, or belong to another key", code="file_not_found"
    )


def _file_of(row: tuple[Any, ...]) -> FileObject:
    file_id, nbytes, made_s, expires_s, name, purpose = row
    return FileObject(
        id=file_id,
        bytes=nbytes,
        created_at=int(made_s),
        expires_at=int(expires_s),
        filename=name,
        purpose=purpose,
    )
