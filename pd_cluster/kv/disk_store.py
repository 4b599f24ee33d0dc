"""Stores sealed blocks as files: one rank's share of an instance's blocks, in its own folder.

Files are written under temporary names and then renamed. Nothing is synchronised to the disk: if a host crash loses or
tears a file, its length or seal shows that, and its block is computed again. Every folder and file is opened by its
name relative to an open folder, without following links. Knows nothing of tokens or of other ranks' files.
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
from pd_cluster.kv.block_seal import NAME_LENGTH, Seal
from pd_cluster.private_files import FOLDER, READ, open_folder, remove, write_whole

log = logging.getLogger(__name__)

NAME = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}")
SHARD = re.compile("[0-9a-f]{2}")  # the folder of the files whose names begin with these digits
UNFINISHED = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}\.tmp")
LOCK_WAIT_S = 10.0  # how long to wait for a previous process that is about to end
PAUSE_S = 0.05
WARN_INTERVAL_S = 60.0  # between warnings that blocks cannot be written
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # after other errors, the file may still exist


class DiskStore:
    """One rank's files. `num_bad` counts files whose content was not what had been written; they are removed."""

    def __init__(self, root: Path, place: str, seal: Seal) -> None:
        """Opens or creates `root`/`place`. Raises ConfigError if it is in use, or if other users can access it."""
        self._seal = seal
        self._path = root / place
        self.num_bad = 0
        self._told_s = float("-inf")
        self._folder = open_folder(root, place, "--kv-disk-cache")
        try:
            self._lock = _locked(self._folder, self._path)
        except BaseException:
            os.close(self._folder)
            raise
        self._name_of: dict[bytes, str] = {}

    def read_index(self) -> list[bytes]:
        """Returns the contents of all files, the least recently used first. Reads only names and lengths.

        Removes files that are incomplete, or whose names were not made with a secret of this store.
        """
        found: list[tuple[float, bytes]] = []
        for shard in sorted(name for name in os.listdir(self._folder) if SHARD.fullmatch(name)):
            with contextlib.suppress(OSError), self._shard(shard) as folder:
                for name in os.listdir(folder):
                    if NAME.fullmatch(name) or UNFINISHED.fullmatch(name):  # other programs' files are skipped
                        self._look(folder, name, found)
        return [content for _, content in sorted(found)]

    def _look(self, folder: int, name: str, found: list[tuple[float, bytes]]) -> None:
        """Adds a file's time and content to `found`, or removes the file if it cannot be used. Raises OSError."""
        known = os.stat(name, dir_fd=folder, follow_symlinks=False)
        content = self._seal.content_of(name) if NAME.fullmatch(name) else None
        is_whole = self._is_whole(known)
        if content is None or not is_whole or content in self._name_of:
            self.num_bad += content is not None and not is_whole
            remove(folder, name)
            return
        found.append((known.st_mtime, content))
        self._name_of[content] = name

    def put(self, content: bytes, block: memoryview) -> bool:
        """Writes a block. Returns False if it could not be written, for example on a full disk."""
        name = self._seal.names(content)[0]
        try:
            with self._shard(name[:2], makes=True) as folder, memoryview(self._seal.seal(content, block)) as sealed:
                write_whole(folder, name, sealed)
        except OSError as error:
            if time.monotonic() > self._told_s + WARN_INTERVAL_S:
                self._told_s = time.monotonic()
                log.warning("--kv-disk-cache %s: blocks cannot be written: %s", self._path, error.strerror)
            return False
        self._name_of[content] = name
        return True

    def get(self, content: bytes, into: memoryview) -> bool:
        """Reads a block. Returns False if its file is gone or has a wrong content; a wrong file is removed.

        Raises OSError if neither can be determined.
        """
        name = self._name_of.get(content)
        if name is None:
            return False
        try:
            with self._shard(name[:2]) as folder:
                sealed = self._read(folder, name)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.discard([content])
            return False
        if not self._seal.open(content, name, sealed, into):
            self.num_bad += 1
            log.warning("a block in %s does not have the content that was written; it is removed", self._path)
            self.discard([content])
            return False
        return True

    def _read(self, folder: int, name: str) -> bytes:
        """Returns the bytes of a complete file, and marks it as used. Returns b"" for an incomplete one.

        Raises OSError.
        """
        file = os.open(name, READ, dir_fd=folder)
        with os.fdopen(file, "rb", buffering=0) as stream:
            if not self._is_whole(os.fstat(file)):
                return b""
            with contextlib.suppress(OSError):
                os.utime(file)
            return stream.readall()

    def _is_whole(self, known: os.stat_result) -> bool:
        return stat.S_ISREG(known.st_mode) and known.st_size == self._seal.sealed_nbytes

    def discard(self, contents: list[bytes]) -> None:
        for content in contents:
            if (name := self._name_of.pop(content, None)) is not None:
                with contextlib.suppress(OSError), self._shard(name[:2]) as folder:
                    remove(folder, name)

    def clear(self) -> None:
        self.discard(list(self._name_of))

    def num_leading(self, contents: list[bytes]) -> int:
        return next((at for at, content in enumerate(contents) if content not in self._name_of), len(contents))

    def get_leading(self, contents: list[bytes], into: list[memoryview]) -> int:
        """Reads blocks in order, up to the first that is unavailable. Returns how many it has read."""
        for at, (content, block) in enumerate(zip(contents, into, strict=True)):
            if not self.get(content, block):
                return at
        return len(contents)

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._folder)

    @contextlib.contextmanager
    def _shard(self, name: str, makes: bool = False) -> Iterator[int]:
        """Opens a folder of files, and creates it first if `makes`. Raises OSError."""
        if makes:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._folder)
        folder = os.open(name, FOLDER, dir_fd=self._folder)
        try:
            yield folder
        finally:
            os.close(folder)


def _locked(folder: int, path: Path) -> int:
    """Locks the folder against other processes. Returns the lock's descriptor. Raises ConfigError."""
    try:
        file = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        raise ConfigError(f"--kv-disk-cache {path}: its file lock cannot be opened: {error.strerror}") from None
    stop_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > stop_s:
                os.close(file)
                raise ConfigError(f"--kv-disk-cache {path}: another process uses it") from None
            time.sleep(PAUSE_S)
