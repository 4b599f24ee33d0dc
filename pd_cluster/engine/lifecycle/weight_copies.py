"""An instance's own copies of versions whose files are not on its host, in a folder below the temporary folder.

This process removes the folder when it ends. The folder of a killed process remains, but its lock is free; the next
process of this user that makes such a folder removes it. Knows nothing of where copies come from.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX, LOCK = "pd-cluster-copies-", "lock"


class WeightCopies:
    """Any thread may call the methods, but only one thread at a time may call those that change the copies."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: the folder for all copies; None: the system's temporary folder."""
        self._root = root or Path(tempfile.gettempdir())
        self._folder: Path | None = None  # made when it is needed
        self._lock: int | None = None
        self._whole: dict[str, Path] = {}  # by digest
        self._number = 0

    def of(self, digest: str) -> Path | None:
        return self._whole.get(digest)

    def begin(self) -> Path:
        """Returns a new folder for a copy. Raises OSError."""
        if self._folder is None or not self._folder.is_dir():
            remove_abandoned(self._root)
            self._folder, self._whole = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._root)), {}  # mode 0700
            self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir(mode=0o700)
        return folder

    def keep(self, digest: str, folder: Path) -> None:
        """Records that a folder has all files of the version with this digest."""
        self._whole[digest] = folder

    def drop(self, digest: str) -> None:
        if (folder := self._whole.pop(digest, None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def keep_only(self, *digests: str) -> None:
        """Removes the copies of other versions."""
        for digest in self._whole.keys() - {*digests}:
            self.drop(digest)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._folder = self._lock = None
        self._whole = {}


def remove_abandoned(root: Path) -> None:
    """Removes the folders of this user's processes that were killed."""
    for lock in root.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.stat().st_uid != os.geteuid() or lock.parent.is_symlink():
                continue
            file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the folder's process lives
                shutil.rmtree(lock.parent, ignore_errors=True)
                log.info("removed %s, whose process has ended", lock.parent)
            finally:
                os.close(file)
