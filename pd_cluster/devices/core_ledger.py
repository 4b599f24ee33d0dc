"""Lets the rank processes of one host share its cores step by step: a ledger of locks. Never imports torch.

Each rank has one byte of a file that all of them can open, and holds a lock on that byte: a shared one while it rests,
an exclusive one while it computes. The number of ranks that compute follows from the locks, and with it the threads of
each: the host's cores, divided evenly. The kernel releases the locks of a process that ends in any way, and nobody
waits for one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pd_cluster import host

log = logging.getLogger(__name__)

FLOCK = struct.Struct("hhqqixxxx")  # struct flock: type, whence, start, len, pid
STAMP = struct.Struct("=d")  # when a rank began to rest, by the monotonic clock; 0: it never computed
COMPUTES = float("inf")  # in its place, where another process holds the lock
MODE = 0o600
LENT_AFTER_S = 0.02  # a shorter rest is one between two steps, whose borrower would only be in the way


def ledger_name() -> str:
    """Returns the name of the ledger's file: processes whose cores may differ never share one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "cgroup")]
    group = Path("/proc/self/cgroup").read_text("utf-8")
    where = repr((boot, spaces, group, sorted(host.cores())))
    return f"cores-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class CoreLedger:
    """The view that one rank has of the ledger. `index` and `size`: its place among the ranks of the table's host.

    A rank that is not seen here may run elsewhere, on other cores or in another container, or keep its cores for
    itself, so they are not lent: it counts as one that computes.
    """

    path: Path
    index: int
    size: int
    num_cores: int
    clock: Callable[[], float] = time.monotonic
    _fd: int = field(default=-1, init=False)
    _is_busy: bool = field(default=False, init=False)
    _others: tuple[tuple[int, bytes], ...] = field(default=(), init=False)  # their places, and a question for each

    @property
    def own_threads(self) -> int:
        """The threads of a rank while all others compute."""
        return max(1, self.num_cores // self.size)

    def open(self) -> None:
        """Raises OSError if the file cannot be made, or its file system has no such locks."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        try:
            self._lock(fcntl.F_RDLCK)
        except OSError:
            self.close()
            raise
        others = [index for index in range(self.size) if index != self.index]
        self._others = tuple((index, _range(fcntl.F_WRLCK, index)) for index in others)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._is_busy = False

    def begin(self) -> None:
        """Counts this rank among those that compute, until `end`; may be called again."""
        if not self._is_busy and self._fd >= 0:
            try:
                self._is_busy = self._lock(fcntl.F_WRLCK)
                if not self._is_busy:
                    self._stamp(COMPUTES)
            except OSError as error:
                self._give_up(error)

    def end(self) -> None:
        if self._fd >= 0:
            self._is_busy = False
            try:
                self._stamp(self.clock())
                self._lock(fcntl.F_RDLCK)
            except OSError as error:
                self._give_up(error)

    def num_threads(self) -> int:
        """Returns the threads that this rank may use now, at least `own_threads`; it asks again after each layer."""
        if self._fd < 0:
            return self.own_threads
        try:
            num_busy = 1 + sum(self._keeps(index, question) for index, question in self._others)
        except OSError as error:
            self._give_up(error)
            return self.own_threads
        return max(self.own_threads, self.num_cores // num_busy)

    def sees_all(self) -> bool:
        """Whether every other rank of the host is seen here, and so may run on the same cores as this one."""
        if self._fd < 0:
            return False
        try:
            return all(self._kind(question) != fcntl.F_UNLCK for _, question in self._others)
        except OSError as error:
            self._give_up(error)
            return False

    def _kind(self, question: bytes) -> int:
        kind: int = FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, question))[0]
        return kind

    def _keeps(self, index: int, question: bytes) -> bool:
        """Whether another rank needs its cores: it computes, did so a moment ago, or is not seen here."""
        if self._kind(question) != fcntl.F_RDLCK:
            return True
        (rests_since_s,) = STAMP.unpack(os.pread(self._fd, STAMP.size, index * STAMP.size).ljust(STAMP.size, b"\0"))
        return bool(self.clock() - rests_since_s < LENT_AFTER_S)

    def _stamp(self, rests_since_s: float) -> None:
        os.pwrite(self._fd, STAMP.pack(rests_since_s), self.index * STAMP.size)

    def _lock(self, kind: int) -> bool:
        """Returns False if another process has this rank's byte: its predecessor, which is about to end."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range(kind, self.index))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def _give_up(self, error: OSError) -> None:
        """Keeps the own share from now on, and to the others is not seen: the file's system does not serve any more."""
        log.warning("this rank keeps its own cores from now on: the ledger %s failed: %s", self.path, error.strerror)
        self.close()


def _range(kind: int, index: int) -> bytes:
    return FLOCK.pack(kind, os.SEEK_SET, index, 1, 0)
