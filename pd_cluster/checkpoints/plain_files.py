"""Reads files of untrusted folders: only regular files, of bounded size, in steps.

A pipe in place of a file does not block. Sizes are checked before reading. No read or digest holds the interpreter's
lock for longer than one step.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError

MAX_WHOLE_NBYTES = 256 << 20  # maximum size of a file that is read whole; today's tokenizers have up to 35 MB
STEP_NBYTES = 1 << 20
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_plain(file: Path, most_nbytes: int | None = None, more_flags: int = 0) -> Any:
    """Opens a file. `most_nbytes` None: any size. Raises OSError, and ModelError if it is not regular or too large."""
    stream = os.fdopen(os.open(file, OPEN | more_flags), "rb")
    found = os.fstat(stream.fileno())
    is_file = stat.S_ISREG(found.st_mode)
    if not is_file or (most_nbytes is not None and found.st_size > most_nbytes):
        stream.close()
        what = f"{found.st_size} bytes; at most {most_nbytes} are read" if is_file else "not a file"
        raise ModelError(f"{file}: {what}")
    return stream


def read_plain(file: Path) -> bytes:
    """Returns the content of a small file. Raises OSError, ModelError."""
    with open_plain(file, MAX_WHOLE_NBYTES) as stream:
        data: bytes = stream.read(MAX_WHOLE_NBYTES)
    return data


def digest_file(stream: Any, digest: Any) -> int:
    """Digests the rest of a file; returns its size."""
    size = 0
    while part := stream.read(STEP_NBYTES):
        digest.update(part)
        size += len(part)
    return size


def read_digested(stream: Any, nbytes: int, digest: Any) -> mmap.mmap:
    """Returns and digests a file's first `nbytes` (at least 1), in new memory.

    A shorter file is padded with zeros, which are not digested.
    """
    data = mmap.mmap(-1, nbytes)
    with memoryview(data) as view:
        at = 0
        while at < nbytes and (num_read := stream.readinto(view[at : at + STEP_NBYTES])):
            digest.update(view[at : at + num_read])
            at += num_read
    return data
