"""Finds the TCP ports on which processes listen, from /proc. Does not know what they serve."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LISTEN = "0A"


class Listener(NamedTuple):
    """`host`: an address at which processes on this machine can connect."""

    pid: int
    host: str
    port: int


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Returns the listeners of running processes, each port once; a shared socket belongs to the first process."""
    found: dict[str, Listener] = {}
    for pid in pids:
        inodes = _sockets(pid)
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == LISTEN and fields[9] in inodes:
                        found.setdefault(fields[9], Listener(pid, *_address(fields[1], family)))
    return sorted(found.values())


def _sockets(pid: int) -> set[str]:
    """Returns the inodes of the process's sockets."""
    inodes = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                link = os.readlink(fd)
                if link.startswith("socket:["):
                    inodes.add(link[len("socket:[") : -1])
    return inodes


def _address(text: str, family: int) -> tuple[str, int]:
    """Parses an address of /proc, where the kernel writes 32-bit words in the machine's byte order."""
    words, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    host = socket.inet_ntop(family, packed)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)
