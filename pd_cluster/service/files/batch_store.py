"""Keeps the batches of all owners, in the database of their files (file_store.py), and the locks of running batches.

The process that holds a batch's lock runs the batch; the kernel releases the lock however the process ends. Knows
nothing of how requests are answered.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from pd_cluster.errors import Overloaded, RequestError, RequestNotFound, called
from pd_cluster.private_files import open_folder, open_own, remove
from pd_cluster.service.files.batch_states import (
    WINDOW_S,
    BatchError,
    BatchErrors,
    BatchObject,
    KeptBatch,
    RequestCounts,
    after,
    ended,
)
from pd_cluster.service.files.file_store import FileStore, new_file_id
from pd_cluster.service.files.kept_rows import Paging, key_of, listed

ID = re.compile(r"batch_[0-9a-f]{32}")
LOCKS = "locks"
MAX_RUNNING = 100  # unfinished batches per owner
RETRY_S = 60
NEVER_S = 1e12
INSERT_FILE = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OutputFile(NamedTuple):
    """One of a batch's two files, complete."""

    id: str
    name: str
    nbytes: int


class RunningBatch(NamedTuple):
    """`is_due`: the batch was cancelled, or its window is over."""

    id: str
    owner: str
    is_due: bool


class BatchStore:
    """All calls wait for the disk, so event loops use `files.on_thread`. All raise StorageFull."""

    def __init__(self, files: FileStore) -> None:
        """Raises ConfigError."""
        self.files = files
        self._database, self._clock = files.database, files.clock
        self._locks = open_folder(Path(files.config.folder), LOCKS, called("files_dir"))

    def close(self) -> None:
        os.close(self._locks)

    # ---- for clients

    def create(
        self, batch: BatchObject, owner: str, models: tuple[str, ...] | None, output_ttl_s: float | None
    ) -> BatchObject:
        """Adds a batch and sets its id and times. Raises RequestNotFound, RequestError, Overloaded."""
        now_s = self._clock()
        batch = replace(
            batch, id=f"batch_{secrets.token_hex(16)}", created_at=int(now_s), expires_at=int(now_s + WINDOW_S)
        )
        kept = KeptBatch(
            batch=batch,
            owner=owner,
            output_id=new_file_id(),
            error_id=new_file_id(),
            models=models,
            output_ttl_s=output_ttl_s,
        )
        values = (
            batch.id,
            key_of(owner),
            now_s,
            now_s + self.files.config.ttl_s,
            1,
            batch.input_file_id,
            _encoded(kept),
        )
        with self.files.storing(), self._database.writing() as connection:
            file = self.files.find(owner, batch.input_file_id)  # read in this transaction, so it stays
            if file.purpose != "batch":
                why = f"{file.id} has the purpose {file.purpose}; expected batch"
                raise RequestError(f"input_file_id: {why}", "input_file_id")
            asked = "SELECT COUNT(*) FROM batches WHERE owner = ? AND running"
            (count,) = connection.execute(asked, (key_of(owner),)).fetchone()
            if count >= MAX_RUNNING:
                raise Overloaded(f"you have {count} unfinished batches, which is the limit; wait for one", RETRY_S)
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        return batch

    def find(self, owner: str, batch_id: str) -> BatchObject:
        """Returns a batch. Raises RequestNotFound for any id that is not a batch of this owner."""
        asked = "SELECT body FROM batches WHERE id = ? AND owner = ?"
        with self.files.storing():
            row = self._database.connection.execute(asked, (batch_id, key_of(owner))).fetchone()
        if row is None:
            raise batch_not_found(batch_id)
        return _decoded(row[0]).batch

    def batches_of(self, owner: str, paging: Paging) -> list[BatchObject]:
        """Returns the newest batches first, one more than `paging` allows if there are more. Raises RequestNotFound."""
        with self.files.storing():
            select = "SELECT body FROM batches WHERE owner = ?"
            rows = listed(self._database.connection, select, [key_of(owner)], paging)
        if rows is None:
            raise batch_not_found(paging.after)
        return [_decoded(row[0]).batch for row in rows]

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Cancels a batch. Raises RequestNotFound, and Refused for a batch that has ended."""
        self.find(owner, batch_id)
        return self._change(batch_id, lambda batch: after(batch, "cancel", self._clock())).batch

    # ---- for processes that run batches

    def running(self) -> list[RunningBatch]:
        """Returns all owners' unfinished batches, the oldest first."""
        now_s = self._clock()
        with self.files.storing():
            asked = "SELECT body FROM batches WHERE running ORDER BY made_s"
            found = [_decoded(body) for (body,) in self._database.connection.execute(asked)]
        return [
            RunningBatch(each.batch.id, each.owner, each.batch.status == "cancelling" or each.batch.expires_at <= now_s)
            for each in found
        ]

    def open_counts(self) -> RequestCounts:
        """Returns the numbers of requests in all unfinished batches together."""
        with self.files.storing():
            bodies = self._database.connection.execute("SELECT body FROM batches WHERE running").fetchall()
        counts = [_decoded(body).batch.request_counts for (body,) in bodies]
        return RequestCounts(*(sum(getattr(each, name) for each in counts) for name in RequestCounts.__struct_fields__))

    def take(self, batch_id: str) -> int | None:
        """Takes and returns a batch's lock; None: another process has it, or the batch has ended."""
        with self.files.storing():
            lock = open_own(batch_id, LOCK, self._locks)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_running = self.load(batch_id).batch.is_running  # read after locking: nobody else runs it
        except BlockingIOError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        if is_running:
            return lock
        self.release(batch_id, lock, has_ended=True)
        return None

    def release(self, batch_id: str, lock: int, has_ended: bool) -> None:
        if has_ended:
            remove(self._locks, batch_id)
        os.close(lock)

    def load(self, batch_id: str) -> KeptBatch:
        """Returns a batch of any owner. Raises RequestNotFound."""
        with self.files.storing():
            return self._read(self._database.connection, batch_id)

    def note_begun(self, batch_id: str, total: int) -> KeptBatch:
        """Records that the input file is valid, and its number of requests, unless the batch was cancelled."""

        def begun(batch: BatchObject) -> BatchObject:
            counts = replace(batch.request_counts, total=total)
            return replace(after(batch, "valid", self._clock()), request_counts=counts)

        return self._change(batch_id, lambda batch: begun(batch) if batch.status == "validating" else batch)

    def note_answered(self, batch_id: str) -> KeptBatch:
        """Records that all requests have lines, unless the batch was cancelled."""

        def answered(batch: BatchObject) -> BatchObject:
            return after(batch, "answered", self._clock()) if batch.status == "in_progress" else batch

        return self._change(batch_id, answered)

    def note_progress(self, batch_id: str, counts: RequestCounts, nbytes: dict[str, int]) -> tuple[KeptBatch, int]:
        """Records a batch's progress. `nbytes`: its files' sizes. Returns the batch, and the most bytes that its files
        may have.
        """
        with self.files.storing(), self._database.writing() as connection:
            kept = self._read(connection, batch_id)
            if kept.batch.is_running:  # a late call has no effect
                kept = replace(kept, batch=replace(kept.batch, request_counts=counts))
                self._save(connection, kept)
                for file_id, size in nbytes.items():
                    row = (file_id, key_of(kept.owner), "batch_output", "", size, self._clock(), NEVER_S, 0)
                    connection.execute(INSERT_FILE, row)
            num_kept = self.files.num_kept(connection, kept.owner)
        return kept, self.files.quota_nbytes - num_kept + sum(nbytes.values())

    def end(
        self,
        batch_id: str,
        counts: RequestCounts,
        files: tuple[OutputFile | None, OutputFile | None],
        errors: list[BatchError] | None = None,
    ) -> KeptBatch:
        """Records the end of a batch and its output and error files, if any, in one transaction.

        `errors`: the faults of its input file.
        """
        now_s, ttl_s = self._clock(), self.files.config.ttl_s
        with self.files.storing(), self._database.writing() as connection:
            kept = self._read(connection, batch_id)
            batch = kept.batch
            if errors and batch.status != "cancelling":
                batch = replace(after(batch, "invalid", now_s), errors=BatchErrors(errors))
            else:
                batch = ended(batch, now_s)
            expires_s = now_s + min(ttl_s, kept.output_ttl_s or ttl_s)
            for file_id in (kept.output_id, kept.error_id):
                connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            for file in files:
                if file is not None:
                    row = (file.id, key_of(kept.owner), "batch_output", file.name, file.nbytes, now_s, expires_s, 1)
                    connection.execute(INSERT_FILE, row)
            output_id, error_id = (file.id if file is not None else None for file in files)
            batch = replace(batch, output_file_id=output_id, error_file_id=error_id, request_counts=counts)
            kept = replace(kept, batch=batch)
            self._save(connection, kept)
        return kept

    def _change(self, batch_id: str, change: Callable[[BatchObject], BatchObject]) -> KeptBatch:
        with self.files.storing(), self._database.writing() as connection:
            kept = self._read(connection, batch_id)
            kept = replace(kept, batch=change(kept.batch))
            self._save(connection, kept)
        return kept

    def _read(self, connection: sqlite3.Connection, batch_id: str) -> KeptBatch:
        row = connection.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
        if row is None:
            raise batch_not_found(batch_id)
        return _decoded(row[0])

    def _save(self, connection: sqlite3.Connection, kept: KeptBatch) -> None:
        """Writes a batch's row; a batch expires a fixed time after its end."""
        values = (_encoded(kept), int(kept.batch.is_running), self._clock() + self.files.config.ttl_s, kept.batch.id)
        connection.execute("UPDATE batches SET body = ?, running = ?, expires_s = ? WHERE id = ?", values)


def batch_not_found(batch_id: str) -> RequestNotFound:
    shown = batch_id if ID.fullmatch(batch_id) else "of this form"
    return RequestNotFound(
        f"there is no batch {shown}; it may have expired, or belong to another key", code="batch_not_found"
    )


def _encoded(kept: KeptBatch) -> bytes:
    return msgspec.json.encode(kept)


def _decoded(body: bytes) -> KeptBatch:
    return msgspec.json.decode(body, type=KeptBatch)
