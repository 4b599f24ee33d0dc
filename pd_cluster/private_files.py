"""Files in folders that belong to this user alone: opened relative to folder handles, without following links.

A pipe or a device where a file is expected never blocks the caller. output_files.py writes the files that an operator
names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from pd_cluster.errors import ConfigError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_folder(root: Path, place: str, named: str) -> int:
    """Opens `root` and then each folder of `place` in it, and makes missing ones; the parent of `root` must exist.

    `named`: the setting that gives the path. Raises ConfigError unless the folder belongs to this user alone.
    """
    path = Path()
    folder: int | None = None
    for part in (str(root), *Path(place).parts):
        path, above = path / part, folder
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=above)
            folder = os.open(part, FOLDER, dir_fd=above)
        except OSError as error:
            told = "must be a folder" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror
            raise ConfigError(f"{named} {path}: {told}") from None
        finally:
            if above is not None:
                os.close(above)
        known = os.fstat(folder)
        if known.st_uid != os.geteuid() or known.st_mode & 0o077:
            os.close(folder)
            raise ConfigError(f"{named} {path}: must be a folder of this user with mode 0700")
    assert folder is not None
    return folder


def check_folder(path: Path, named: str, files: tuple[str, ...] = ()) -> None:
    """Makes a private folder, or checks that it is private, and that each of `files` in it is a file or missing.

    Raises ConfigError.
    """
    folder = open_folder(path, "", named)
    try:
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise ConfigError(f"{named} {path}: {name} is not a file; remove it, or give another folder")
    finally:
        os.close(folder)


def open_own(file: Path | str, flags: int = READ, folder: int | None = None) -> int:
    """Opens a plain file of a private folder. Raises OSError, also for a link, a pipe or a device."""
    descriptor = os.open(file, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(file))
    return descriptor


def reading(file: Path) -> BinaryIO:
    """Opens a file of a private folder to read it. Raises OSError."""
    return os.fdopen(open_own(file), "rb")


def write_whole(folder: int, name: str, data: bytes | memoryview) -> None:
    """Writes a temporary file and renames it to `name`. Raises OSError, and then leaves no file."""
    unfinished = f"{name}.tmp"
    remove(folder, unfinished)
    try:
        file = os.open(unfinished, CREATE, 0o600, dir_fd=folder)
        try:
            write_all(file, data)
        finally:
            os.close(file)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        remove(folder, unfinished)
        raise


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`. Raises OSError; then a part may have been written."""
    at, whole = 0, memoryview(data)
    while at < len(whole):
        at += os.write(descriptor, whole[at:])


def remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
