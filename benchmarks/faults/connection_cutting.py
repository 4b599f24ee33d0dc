"""Cuts TCP connections between two running processes. Both ends see an end of file, as after a broken network path.

Works on Linux, for processes that this process has started as the same user. The kernel gives this process a copy of
the other process's descriptor (pidfd_getfd), with which it shuts the connection down. Knows nothing of clusters.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pd_cluster.errors import PdClusterError

PIDFD_GETFD = 438  # system call; the same number on every architecture
ESTABLISHED = "01"


class Connection(NamedTuple):
    """One end of an established connection. Addresses have the form of /proc/net/tcp."""

    pid: int
    fd: int
    local: str
    remote: str


def between(one: Iterable[int], other: Iterable[int]) -> list[Connection]:
    """Returns the ends that processes in `one` hold of connections to processes in `other`."""
    theirs = {(end.local, end.remote) for end in _ends(other)}
    return [end for end in _ends(one) if (end.remote, end.local) in theirs]


def cut(ends: Iterable[Connection]) -> int:
    """Cuts the connections, except those that have already ended. Returns how many it has cut."""
    num_cut = 0
    for end in ends:
        with contextlib.suppress(ProcessLookupError, OSError), _borrowed(end.pid, end.fd) as borrowed:
            borrowed.shutdown(socket.SHUT_RDWR)
            num_cut += 1
    return num_cut


def check_can_cut() -> None:
    """Raises PdClusterError if this kernel does not share descriptors, or not with this user's processes."""
    with socket.socket() as probe:
        try:
            _borrowed(os.getpid(), probe.fileno()).close()
        except OSError as error:
            raise PdClusterError(f"connections cannot be cut here: pidfd_getfd: {error.strerror}") from None


def _ends(pids: Iterable[int]) -> list[Connection]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has already ended
            addresses = _established(pid)
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(entry)
                    inode = target.removeprefix("socket:[").removesuffix("]")
                    if target.startswith("socket:[") and inode in addresses:
                        found.append(Connection(pid, int(entry.name), *addresses[inode]))
    return found


def _established(pid: int) -> dict[str, tuple[str, str]]:
    """Maps inode -> local and remote address, for all connections in the process's network namespace."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                if state == ESTABLISHED:
                    found[rest[5]] = (local, remote)
    return found


def _borrowed(pid: int, fd: int) -> socket.socket:
    """Returns a socket that another process has open. Raises OSError."""
    if sys.platform != "linux":
        raise OSError(0, "not on this system")
    pidfd = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.socket(fileno=copy)
    finally:
        os.close(pidfd)
