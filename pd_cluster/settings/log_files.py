"""The files in which `pd-cluster up` keeps its processes' log lines, for `pd-cluster logs` and the dashboard."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from pd_cluster.private_files import APPEND, open_folder, open_own

log = logging.getLogger(__name__)

MAX_FILE_NBYTES = 2 << 20  # a file of this size replaces the older file; only one older file is kept
FOLDER = "logs"
LOG_EVERY_S = 60.0  # the time between warnings that lines cannot be kept


def folder_of(tables: Path) -> Path:
    """Returns the folder next to the rank tables of one launch."""
    return tables / FOLDER


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


class LogFile:
    """Appends lines to a process's file (0600), in a folder that only this user can open.

    If the disk fails, lines are lost, and a warning is logged at most once a minute.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Makes the folder if it does not exist. Raises ConfigError if other users can open it."""
        self._file = file_of(folder, name)
        self._folder = open_folder(folder, "", "the folder of log lines")
        self._fd = -1  # of the file; -1 while it is closed
        self._logged_s = float("-inf")
        with contextlib.suppress(OSError):  # the first line reports the error
            self._fd = open_own(self._file.name, APPEND, self._folder)

    def write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="replace")
        try:
            if self._fd < 0:
                self._fd = open_own(self._file.name, APPEND, self._folder)
            if os.fstat(self._fd).st_size + len(data) > MAX_FILE_NBYTES:
                self._close_file()
                older = self._file.with_suffix(".log.1").name
                os.rename(self._file.name, older, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                self._fd = open_own(self._file.name, APPEND, self._folder)
            os.write(self._fd, data)
        except OSError as error:
            if time.monotonic() > self._logged_s + LOG_EVERY_S:
                self._logged_s = time.monotonic()
                log.warning("%s: lines cannot be kept: %s", self._file, error.strerror)

    def close(self) -> None:
        self._close_file()
        os.close(self._folder)

    def _close_file(self) -> None:
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
