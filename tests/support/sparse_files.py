"""Large files that take no room on the disk, and how much of them a process reads."""

from __future__ import annotations

import os
from pathlib import Path

MANY_NBYTES = 8 << 20  # more than a test reads beside such a file


def padded(file: Path, nbytes: int) -> None:
    """Makes a file longer by a hole."""
    os.truncate(file, os.path.getsize(file) + nbytes)


def num_bytes_read() -> int:
    """Returns how many bytes this process has read in its life, from anywhere."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
