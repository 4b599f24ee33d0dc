"""Writes the output and error files of a running batch, which also record which requests are answered. Each answer is
one append. A process that is killed during an append leaves an incomplete last line, which the next owner cuts off.
Each request gets one line, even after a second attempt. Knows nothing of how requests are answered.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from pd_cluster.private_files import open_own, remove
from pd_cluster.service.files.batch_lines import BatchEntry, answered_in, unanswered_line
from pd_cluster.service.files.batch_states import KeptBatch, RequestCounts
from pd_cluster.service.files.batch_store import OutputFile
from pd_cluster.service.files.file_store import FileStore

APPEND = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class AnswerFile:
    """Appends whole lines to a file of the store. Only one thread at a time may call it."""

    def __init__(self, store: FileStore, file_id: str) -> None:
        """Reads the existing lines, and cuts off an incomplete one. Raises StorageFull."""
        self.id, self._store = file_id, store
        with store.storing():
            self._fd = open_own(file_id, APPEND, store.content)
            with os.fdopen(os.dup(self._fd), "rb") as file:
                found = answered_in(file, file_id)
            os.ftruncate(self._fd, found.nbytes)
        self.keys, self.nbytes, self.num_lines = found.keys, found.nbytes, len(found.keys)

    def append(self, line: bytes) -> None:
        """Writes a whole line or nothing. Raises StorageFull."""
        rest, at = memoryview(line), self.nbytes
        with self._store.storing():
            try:
                while rest:
                    num_written = os.pwrite(self._fd, rest, at)
                    rest, at = rest[num_written:], at + num_written
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self.nbytes)
                raise
        self.nbytes += len(line)
        self.num_lines += 1

    def sync(self) -> None:
        with self._store.storing():
            os.fsync(self._fd)

    def finished(self, name: str) -> OutputFile | None:
        """Returns the complete file. Removes an empty file and returns None."""
        self.sync()
        if self.nbytes:
            return OutputFile(self.id, name, self.nbytes)
        remove(self._store.content, self.id)
        return None

    def close(self) -> None:
        os.close(self._fd)


class BatchJournal:
    """All methods that write wait for the disk, and may be called from any thread. They raise StorageFull."""

    def __init__(self, store: FileStore, kept: KeptBatch) -> None:
        self._batch_id = kept.batch.id
        self.total = kept.batch.request_counts.total
        self._lock, self._is_closed = threading.Lock(), False
        self._answers = AnswerFile(store, kept.output_id)
        try:
            self._errors = AnswerFile(store, kept.error_id)
        except BaseException:
            self._answers.close()
            raise
        self._keys = self._answers.keys | self._errors.keys

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.total, self._answers.num_lines, self._errors.num_lines)

    @property
    def is_complete(self) -> bool:
        """Whether every request has a line."""
        return len(self._keys) >= self.total

    @property
    def nbytes(self) -> dict[str, int]:
        """File id -> size."""
        return {file.id: file.nbytes for file in (self._answers, self._errors)}

    def has(self, entry: BatchEntry) -> bool:
        return entry.key in self._keys

    def write(self, entry: BatchEntry, line: bytes, is_answered: bool) -> None:
        """Writes a request's line, unless there is one or the journal is closed."""
        key = entry.key
        with self._lock:
            if key in self._keys or self._is_closed:
                return
            (self._answers if is_answered else self._errors).append(line)
            self._keys.add(key)

    def give_up(self, entries: Iterator[BatchEntry], code: str, why: str) -> None:
        """Writes an error for each request without a line."""
        for entry in entries:
            if not self.has(entry):
                self.write(entry, unanswered_line(entry, code, why), is_answered=False)

    def sync(self) -> None:
        """Ensures that everything written so far survives a power cut."""
        with self._lock:
            if not self._is_closed:
                self._answers.sync()
                self._errors.sync()

    def finished(self) -> tuple[OutputFile | None, OutputFile | None]:
        """Returns the complete output and error files; None in place of an empty one."""
        with self._lock:
            names = (f"{self._batch_id}_output.jsonl", f"{self._batch_id}_error.jsonl")
            return self._answers.finished(names[0]), self._errors.finished(names[1])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._answers.close()
            self._errors.close()
