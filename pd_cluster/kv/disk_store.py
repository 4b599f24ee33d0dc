"""Sealed blocks as files: one rank's share of an instance's blocks, in a folder of its own.

Files are written beside their place and renamed. Nothing is synchronised to the disk: what a crash of the host loses or
tears is noticed by its length or its seal, and is computed again. Knows nothing of tokens, or of what other ranks have.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pd_cluster.errors import ConfigError
from pd_cluster.kv.seal import NAME_LENGTH, Seal

log = logging.getLogger(__name__)

NAME = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}")
UNFINISHED = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}\.tmp")
LOCK_WAIT_S = 10.0  # for a predecessor that is about to end
PAUSE_S = 0.05
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # other errors say nothing about the file


class DiskStore:
    """`num_bad` counts files that were there and not what was written: they are never used, and removed."""

    def __init__(self, root: Path, place: str, seal: Seal) -> None:
        """Opens or makes `root`/`place`. Raises ConfigError: it is not a folder of this user's alone, or is in use."""
        self._seal = seal
        self._folder = root / place
        self.num_bad = 0
        _make_private(root)
        for folder in (*reversed([p for p in self._folder.parents if root in p.parents]), self._folder):
            _make_private(folder)
        self._lock = _locked(self._folder)
        self._name_of: dict[bytes, str] = {}

    def read_index(self) -> list[bytes]:
        """Returns the contents that files have, the least recently used first. Reads names and lengths alone.

        Removes files that are not whole, or that no secret here has named.
        """
        found: list[tuple[float, bytes]] = []
        for entry in self._entries():
            if not (NAME.fullmatch(entry.name) or UNFINISHED.fullmatch(entry.name)):
                continue  # not ours
            known = entry.stat(follow_symlinks=False)
            content = self._seal.content_of(entry.name) if NAME.fullmatch(entry.name) else None
            is_whole = stat.S_ISREG(known.st_mode) and known.st_size == self._seal.sealed_nbytes
            if content is None or not is_whole or content in self._name_of:
                self.num_bad += content is not None and not is_whole
                _remove(Path(entry.path))
                continue
            found.append((known.st_mtime, content))
            self._name_of[content] = entry.name
        return [content for _, content in sorted(found)]

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for folder in list(os.scandir(self._folder)):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                yield from list(os.scandir(folder.path))

    def put(self, content: bytes, block: memoryview) -> bool:
        """Writes a block; False: it could not be written, as on a full disk."""
        name = self._seal.names(content)[0]
        path = self._path(name)
        unfinished = path.with_name(f"{name}.tmp")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _remove(unfinished)
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with memoryview(self._seal.seal(content, block)) as sealed:
                    at = 0
                    while at < len(sealed):
                        at += os.write(file, sealed[at:])
            finally:
                os.close(file)
            os.rename(unfinished, path)
        except OSError as error:
            log.debug("%s: %s", path, error)
            _remove(unfinished)
            return False
        self._name_of[content] = name
        return True

    def get(self, content: bytes, into: memoryview) -> bool:
        """Reads a block; False: its file is gone, or not what was written, and then it is removed.

        Raises OSError where that cannot be told.
        """
        name = self._name_of.get(content)
        if name is None:
            return False
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(file, "rb", buffering=0) as stream:
                sealed = stream.readall() if os.fstat(file).st_size == self._seal.sealed_nbytes else b""
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.discard([content])
            return False
        if not self._seal.open(content, name, sealed, into):
            self.num_bad += 1
            log.warning("a block in %s is not what was written there; it is removed", self._folder)
            self.discard([content])
            return False
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    def discard(self, contents: list[bytes]) -> None:
        for content in contents:
            if (name := self._name_of.pop(content, None)) is not None:
                _remove(self._path(name))

    def clear(self) -> None:
        self.discard(list(self._name_of))

    def num_leading(self, contents: list[bytes]) -> int:
        return next((at for at, content in enumerate(contents) if content not in self._name_of), len(contents))

    def get_leading(self, contents: list[bytes], into: list[memoryview]) -> int:
        """Reads blocks in order, up to the first that cannot be had; returns how many."""
        for at, (content, block) in enumerate(zip(contents, into, strict=True)):
            if not self.get(content, block):
                return at
        return len(contents)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


def _make_private(folder: Path) -> None:
    """Makes a folder for this user alone, or checks that it is one. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        known = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"--kv-disk-cache {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise ConfigError(f"--kv-disk-cache {folder}: must be a folder of this user's with mode 0700")


def _locked(folder: Path) -> int:
    """Returns the descriptor that keeps others from the folder. Raises ConfigError."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    stop_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > stop_s:
                os.close(file)
                raise ConfigError(f"--kv-disk-cache {folder}: another process uses it") from None
            time.sleep(PAUSE_S)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
