"""A ledger of locks with which the rank processes of a host share its cores, step by step. Never imports torch.

Each rank locks one byte of a common file, with a shared lock while it is idle and an exclusive lock while it computes.
The locks show how many ranks compute; these ranks share the host's cores evenly. The kernel releases the locks of ended
processes, and no process waits for a lock.
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
STAMP = struct.Struct("=d")  # monotonic time at which a rank became idle; 0: it never computed
COMPUTES = float("inf")  # the stamp of a computing rank whose lock another process still holds
MODE = 0o600
LENT_AFTER_S = 0.02  # cores are lent after this idle time; a shorter idle time is a pause between two steps


def ledger_name() -> str:
    """Returns the ledger's file name, distinct for processes whose cores may differ."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "cgroup")]
    group = Path("/proc/self/cgroup").read_text("utf-8")
    where = repr((boot, spaces, group, sorted(host.cores())))
    return f"cores-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class CoreLedger:
    """One rank's view of the ledger. `index` and `size`: its position among the ranks of its host in the table.

    A rank without a lock in this file may run on other cores or in another container, or may lend no cores. Such a rank
    counts as computing.
    """

    path: Path
    index: int
    size: int
    num_cores: int
    clock: Callable[[], float] = time.monotonic
    _fd: int = field(default=-1, init=False)
    _is_busy: bool = field(default=False, init=False)
    _others: tuple[tuple[int, bytes], ...] = field(
        default=(), init=False
    )  # the other ranks' indices, each with a query of its lock

    @property
    def own_threads(self) -> int:
        """The number of threads of a rank while all ranks compute."""
        return max(1, self.num_cores // self.size)

    def open(self) -> None:
        """Opens the file. Raises OSError if it cannot be made, or if its file system does not support such locks."""
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
        """Marks this rank as computing until `end`; may be called again."""
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
        """Returns how many threads this rank may use now, at least `own_threads`; called again after each layer."""
        if self._fd < 0:
            return self.own_threads
        try:
            num_busy = 1 + sum(self._keeps(index, question) for index, question in self._others)
        except OSError as error:
            self._give_up(error)
            return self.own_threads
        return max(self.own_threads, self.num_cores // num_busy)

    def sees_all(self) -> bool:
        """Whether every other rank of the host holds a lock in this file, and so may run on the same cores."""
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
        """Whether another rank needs its cores: it computes, has just computed, or holds no lock here."""
        if self._kind(question) != fcntl.F_RDLCK:
            return True
        (rests_since_s,) = STAMP.unpack(os.pread(self._fd, STAMP.size, index * STAMP.size).ljust(STAMP.size, b"\0"))
        return bool(self.clock() - rests_since_s < LENT_AFTER_S)

    def _stamp(self, rests_since_s: float) -> None:
        os.pwrite(self._fd, STAMP.pack(rests_since_s), self.index * STAMP.size)

    def _lock(self, kind: int) -> bool:
        """Returns False while this rank's predecessor, which is about to end, still holds the lock."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range(kind, self.index))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def _give_up(self, error: OSError) -> None:
        """Limits this rank to its own share from now on and releases its lock, because the file system failed."""
        log.warning("this rank keeps its own cores from now on: the ledger %s failed: %s", self.path, error.strerror)
        self.close()


def _range(kind: int, index: int) -> bytes:
    return FLOCK.pack(kind, os.SEEK_SET, index, 1, 0)
