"""Writes files that an operator names for a command's output, such as `-o FILE` and `--json FILE`.

As in a shell, a link is followed, and a pipe, a device or standard output is written to. Unlike in a shell, an existing
file is replaced only when the new one is complete, so that a full disk loses nothing, and the wait for a pipe's reader
is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path

from pd_cluster.errors import ConfigError

READER_WAIT_S = 60.0
PAUSE_S = 0.1
MODE = 0o666  # minus the umask, as in a shell
STANDARD = (1, 2)  # standard output and error


def open_output(file: str, flag: str, flags: int = os.O_WRONLY, wait_s: float | None = None) -> int:
    """Opens a file to append to it, or a pipe or a device. Raises ConfigError, also for a pipe without a reader."""
    flags |= os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    until_s = time.monotonic() + (READER_WAIT_S if wait_s is None else wait_s)
    while True:
        try:
            descriptor = os.open(file, flags, MODE)
        except OSError as error:
            if error.errno != errno.ENXIO or not _is_pipe(file):
                raise ConfigError(f"{flag} {file}: cannot be written: {error.strerror}") from None
            if time.monotonic() > until_s:
                raise ConfigError(f"{flag} {file}: nobody reads this pipe; start its reader") from None
            time.sleep(PAUSE_S)
            continue
        os.set_blocking(descriptor, True)
        return descriptor


def write_output(file: str, flag: str, data: bytes) -> None:
    """Writes the whole content. Raises ConfigError, and then an existing file is unchanged."""
    try:
        if (descriptor := _standard(file)) is not None:
            _write(descriptor, data)
        elif os.path.exists(file) and not os.path.isfile(file):
            descriptor = open_output(file, flag)
            try:
                _write(descriptor, data)
            finally:
                os.close(descriptor)
        else:
            _replace(os.path.realpath(file), data)
    except OSError as error:
        raise ConfigError(f"{flag} {file}: cannot be written: {error.strerror}") from None


def _standard(file: str) -> int | None:
    """Returns the descriptor of standard output or error if `file` names it, as /dev/stdout does."""
    with contextlib.suppress(OSError):
        found = os.stat(file)
        return next((each for each in STANDARD if os.path.samestat(found, os.fstat(each))), None)
    return None


def _is_pipe(file: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.stat(file).st_mode)
    return False


def _replace(file: str, data: bytes) -> None:
    """Writes a temporary file in the same folder, with the existing file's access, and renames it. Raises OSError."""
    beside = Path(f"{file}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(file).st_mode))
            _write(descriptor, data)
        finally:
            os.close(descriptor)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _write(descriptor: int, data: bytes) -> None:
    at, whole = 0, memoryview(data)
    while at < len(whole):
        at += os.write(descriptor, whole[at:])
