"""An SQLite database in a private folder, shared by processes of one host; each thread has its own connection."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from pd_cluster.private_files import check_folder, open_own

BUSY_TIMEOUT_S = 10.0  # the longest wait for another process's write


class PrivateDatabase:
    """`connection` and `writing` wait for the disk, so event loops use a thread. Both raise sqlite3.Error."""

    def __init__(self, file: Path, setting: str, schema: str) -> None:
        """Creates or opens the folder. Raises ConfigError, OSError and sqlite3.Error.

        `setting` names the folder in errors.
        """
        self.file = file
        self._local = threading.local()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(file.parent, setting, (file.name, f"{file.name}-wal", f"{file.name}-shm"))
        os.close(open_own(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC))
        self.connection.executescript(schema)

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = sqlite3.connect(self.file, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            found.execute("PRAGMA journal_mode = WAL")  # readers do not wait for writers
            found.execute("PRAGMA synchronous = NORMAL")
            found.execute("PRAGMA secure_delete = ON")  # removed texts do not stay in the file
            self._local.connection = found
        return found

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Runs the block as one transaction."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise

    def close(self) -> None:
        """Closes the calling thread's connection."""
        self.connection.close()
        del self._local.connection
