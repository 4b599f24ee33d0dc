"""Makes large sparse files, and measures how many bytes a process reads."""

from __future__ import annotations

import os
from pathlib import Path

MANY_NBYTES = 8 << 20  # more than a test reads from other files


def padded(file: Path, nbytes: int) -> None:
    """Extends a file by a hole of `nbytes`."""
    os.truncate(file, os.path.getsize(file) + nbytes)


def num_bytes_read() -> int:
    """Returns how many bytes this process has read since its start, from all files."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
