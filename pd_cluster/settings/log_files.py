"""The files in which `pd-cluster up` keeps the lines of its processes, for `pd-cluster logs` and the dashboard."""

from __future__ import annotations

import os
from pathlib import Path

MAX_FILE_NBYTES = 2 << 20  # then it becomes the older file, of which there is one
FOLDER = "logs"


def folder_of(tables: Path) -> Path:
    """Returns the folder beside the rank tables of one launch."""
    return tables / FOLDER


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


class LogFile:
    """Appends lines to a process's file, 0600. An error of the disk loses lines and nothing else."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = file_of(folder, name)
        self._older = self._file.with_suffix(".log.1")
        folder.mkdir(mode=0o700, exist_ok=True)
        self._fd = self._open()
        self._num_bytes = os.fstat(self._fd).st_size

    def write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="replace")
        try:
            if self._num_bytes + len(data) > MAX_FILE_NBYTES:
                os.close(self._fd)
                self._file.replace(self._older)
                self._fd, self._num_bytes = self._open(), 0
            self._num_bytes += os.write(self._fd, data)
        except OSError:
            return

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
