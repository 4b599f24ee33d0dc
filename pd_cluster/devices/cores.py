"""Lets the rank processes of one host share its cores step by step: a ledger of locks. Never imports torch.

Each rank has one byte of a file that all of them can open, and holds a lock on that byte while it computes. The number
of ranks that compute follows from the locks, and with it the threads of each: the host's cores, divided evenly. The
kernel releases the locks of a process that ends in any way, and nobody waits for one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

FLOCK = struct.Struct("hhqqixxxx")  # struct flock: type, whence, start, len, pid
MODE = 0o600
HAS_BEEN_HERE = b"\1"


def ledger_name() -> str:
    """Returns the name of the ledger's file: processes whose cores may differ never share one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "cgroup")]
    group = Path("/proc/self/cgroup").read_text("utf-8")
    where = repr((boot, spaces, group, sorted(os.sched_getaffinity(0))))
    return f"cores-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class CoreLedger:
    """The view that one rank has of the ledger. `index` and `size`: its place among the ranks of the table's host.

    A rank that has never opened this file may run elsewhere, on other cores or in another container, so its cores are
    not lent: it counts as one that computes.
    """

    path: Path
    index: int
    size: int
    num_cores: int
    _fd: int = field(default=-1, init=False)
    _is_busy: bool = field(default=False, init=False)
    _others: tuple[tuple[int, bytes], ...] = field(default=(), init=False)  # their bytes, and a question for each

    @property
    def own_threads(self) -> int:
        """The threads of a rank while all others compute."""
        return max(1, self.num_cores // self.size)

    def open(self) -> None:
        """Raises OSError if the file cannot be made, or its file system has no such locks."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        try:
            os.pwrite(self._fd, HAS_BEEN_HERE, self.index)
            self._lock(fcntl.F_UNLCK)
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
            self._is_busy = self._lock(fcntl.F_WRLCK)

    def end(self) -> None:
        if self._is_busy:
            self._is_busy = False
            self._lock(fcntl.F_UNLCK)

    def num_threads(self) -> int:
        """Returns the threads that this rank may use now, at least `own_threads`; it asks again after each layer."""
        if self._fd < 0:
            return self.own_threads
        here = os.pread(self._fd, self.size, 0)
        num_busy = 1
        for index, question in self._others:
            if here[index : index + 1] != HAS_BEEN_HERE or self._computes(question):
                num_busy += 1
        return max(self.own_threads, self.num_cores // num_busy)

    def _computes(self, question: bytes) -> bool:
        kind, *_ = FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, question))
        return bool(kind != fcntl.F_UNLCK)

    def _lock(self, kind: int) -> bool:
        """Returns False if another process has this rank's byte: its predecessor, which is about to end."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range(kind, self.index))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True


def _range(kind: int, index: int) -> bytes:
    return FLOCK.pack(kind, os.SEEK_SET, index, 1, 0)
