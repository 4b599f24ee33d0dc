"""A lock for commands that read, change and replace a file, so that only one such command runs at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pd_cluster.errors import ConfigError

LOCK_TIMEOUT_S = 10.0
PAUSE_S = 0.02


@contextlib.contextmanager
def file_lock(file: Path) -> Iterator[Path]:
    """Locks the file's folder against other such commands. Raises ConfigError.

    Yields the file or, for a symbolic link, its target, so that the command replaces the target and keeps the link.
    """
    real = Path(os.path.realpath(file))
    try:
        folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror}; make its folder first") from None
    try:
        until_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise ConfigError(f"--file {file}: another command holds its folder's lock; try again") from None
                time.sleep(PAUSE_S)
        yield real
    finally:
        os.close(folder)
