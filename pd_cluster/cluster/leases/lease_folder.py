"""Keeps the schedulers' record in a folder of one host. Knows nothing of the record's meaning (membership_lease.py).

Each version is a separate file, created by link(2), which fails if the file exists: so exactly one process writes each
version. The record has no lock, so a stopped process never blocks others. A lock on a separate file reserves a
scheduler's number as long as the scheduler runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

import msgspec

from pd_cluster.cluster.leases.membership_lease import LeaseRecord
from pd_cluster.errors import ConfigError, LeaseUnavailable, called
from pd_cluster.private_files import check_folder, open_own, reading

NUM_KEPT = 3  # versions that are kept, because a reader may have listed an old one that it has not opened yet
MAX_RECORD_NBYTES = 4 << 20
DIGITS = 20
LEFT_S = 60.0  # the age from which a file counts as abandoned


class LeaseFolder:
    """Creates the folder (0700) if it does not exist. Raises ConfigError if another user owns it or can open it."""

    max_record_nbytes = MAX_RECORD_NBYTES

    def __init__(self, path: Path) -> None:
        self.path = path
        check_folder(path, called("scheduler_lease"))
        self._lock = -1
        self._known = 0, b""  # the version that was last read or written, and its content
        for left in path.glob("new-*"):  # left by a process that was killed while it wrote; newer ones may be in use
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_S:
                    left.unlink()

    def take(self, index: int) -> None:
        """Reserves this scheduler's number until the process ends. Raises ConfigError if another process has it."""
        flag, file = f"{called('scheduler_index')} {index}", self.path / f"scheduler-{index}"
        try:
            self._lock = open_own(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{flag}: another scheduler of {self.path} has this number; give each scheduler its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"{flag}: {file}: {error.strerror}") from None

    def read(self) -> LeaseRecord:
        for _ in range(NUM_KEPT):
            version = self._last()
            if not version:
                self._known = 0, b""
                return LeaseRecord()
            try:
                with reading(self._file(version)) as file:
                    content = file.read(MAX_RECORD_NBYTES + 1)
                record = msgspec.json.decode(content, type=LeaseRecord)
            except FileNotFoundError:
                continue  # newer versions were written in between
            except (OSError, ValueError) as error:
                raise LeaseUnavailable(f"{self._file(version)}: {error}") from None
            if record.version != version:
                raise LeaseUnavailable(f"{self._file(version)}: it contains version {record.version}")
            self._known = version, content
            return record
        raise LeaseUnavailable(f"{self.path}: the record changes faster than it can be read")

    def write(self, record: LeaseRecord) -> bool:
        if record.version != self._known[0] + 1:
            return False
        new, written = self.path / f"new-{secrets.token_hex(8)}", msgspec.json.encode(record)
        try:
            if not self._is_known_there():
                return False
            with new.open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(written)
                file.flush()
                os.fsync(file.fileno())  # so a version that has a name is complete, even after a power failure
            try:
                os.link(new, self._file(record.version))
            except FileExistsError:
                return False
            # After a long stop, this process may have re-created a version that had existed and was removed.
            if self._last() != record.version or not self._is_known_there():
                self._take_back(record.version, written)
                return False
            self._known = record.version, written
            self._tidy(record.version)
            return True
        except OSError as error:
            raise LeaseUnavailable(f"{self.path}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                new.unlink()

    def _take_back(self, version: int, written: bytes) -> None:
        """Removes a version that this process should not have written, unless another process has since replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if self._content(version) == written:
                self._file(version).unlink()

    def _is_known_there(self) -> bool:
        """Whether the version that this process last read or wrote is still there.

        If not, the folder was emptied, and another process may since have written a record and hold a lease.
        """
        version, content = self._known
        if not version:
            return True
        try:
            return self._content(version) == content
        except FileNotFoundError:
            return False

    def _last(self) -> int:
        """Returns the last version; 0 if there is none. Raises LeaseUnavailable."""
        try:
            return max(self._versions(), default=0)
        except OSError as error:
            raise LeaseUnavailable(f"{self.path}: {error.strerror}") from None

    def _versions(self) -> list[int]:
        return [int(name) for name in os.listdir(self.path) if name.isdecimal() and len(name) == DIGITS]

    def _tidy(self, version: int) -> None:
        for old in self._versions():
            if old <= version - NUM_KEPT:
                with contextlib.suppress(OSError):
                    self._file(old).unlink()

    def _content(self, version: int) -> bytes:
        """Returns a version's content. Raises OSError."""
        with reading(self._file(version)) as file:
            return file.read(MAX_RECORD_NBYTES + 1)

    def _file(self, version: int) -> Path:
        return self.path / f"{version:0{DIGITS}d}"
