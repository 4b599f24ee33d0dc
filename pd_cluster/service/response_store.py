"""Responses that are kept for their clients: one file each, in a folder that all API processes of a host share.

A file is found by its owner and its id only: another owner's id is as unknown as a made-up one. Knows nothing of HTTP,
nor of what a response means.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pd_cluster.errors import ConfigError, RequestNotFound, called
from pd_cluster.settings.kept_responses import KeptResponses
from ranktable_tools.files import write_private

log = logging.getLogger(__name__)

ID = re.compile(r"resp_[0-9a-f]{48}")
LOCK = ".lock"  # held while files are written or removed
SWEEP_PERIOD_S = 60.0

Json = dict[str, Any]


class Kept(msgspec.Struct):
    """`items`: all that the response answered, earlier turns included."""

    response: Json
    items: list[Json]

    @property
    def conversation(self) -> list[Json]:
        return [*self.items, *self.response["output"]]


class _File(NamedTuple):
    made_s: float
    nbytes: int
    path: Path


class ResponseStore:
    """Every method works on files, so callers run it on a thread.

    A response is gone `ttl_s` after it was kept. Files are removed whenever the store is used, and once a minute at
    most for all owners.
    """

    def __init__(self, config: KeptResponses) -> None:
        """Makes the folder, or takes it over. Raises ConfigError if it is not this user's alone."""
        self._config = config
        self._folder = Path(config.folder)
        self._next_sweep_s = 0.0
        named = f"{called('response_store')} {config.folder}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._folder.stat()
            with self._locked():
                self._sweep()
        except OSError as error:
            raise ConfigError(f"{named}: cannot be used: {error.strerror or error}; give another folder") from None
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{named}: others can open it; give a folder of mode 0700 that this user owns")

    def keep(self, owner: str, kept: Kept) -> bool:
        """Keeps a response under its id. Returns False if it has no room or cannot be written."""
        body = msgspec.json.encode(kept).decode()
        most_nbytes = self._config.tenant_mib << 20
        if len(body.encode()) > most_nbytes:
            return False
        try:
            folder = self._folder_of(owner)
            with self._locked():
                folder.mkdir(mode=0o700, exist_ok=True)
                write_private(folder / kept.response["id"], body)
                self._make_room(folder, most_nbytes)
                self._sweep()
        except OSError as error:
            log.error("a response cannot be kept in %s: %s", self._folder, error.strerror or error)
            return False
        return True

    def find(self, owner: str, response_id: str) -> Kept:
        """Raises RequestNotFound for any id that is not a live one of this owner."""
        path = self._path(owner, response_id)
        try:
            if path.stat().st_mtime + self._config.ttl_s > time.time():
                return msgspec.json.decode(path.read_bytes(), type=Kept)
        except (OSError, msgspec.MsgspecError):
            pass
        raise not_found(response_id)

    def remove(self, owner: str, response_id: str) -> None:
        """Raises RequestNotFound like `find`."""
        self.find(owner, response_id)
        try:
            with self._locked():
                self._path(owner, response_id).unlink()
        except OSError:
            raise not_found(response_id) from None

    def _path(self, owner: str, response_id: str) -> Path:
        """Returns the file of an id, which is checked before it becomes part of a path. Raises RequestNotFound."""
        if not ID.fullmatch(response_id):
            raise not_found(response_id)
        return self._folder_of(owner) / response_id

    def _folder_of(self, owner: str) -> Path:
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, folder: Path, most_nbytes: int) -> None:
        """Removes an owner's oldest files until the rest has room."""
        files = sorted(_files(folder))
        nbytes = sum(file.nbytes for file in files)
        for file in files:
            if nbytes <= most_nbytes:
                return
            file.path.unlink(missing_ok=True)
            nbytes -= file.nbytes

    def _sweep(self) -> None:
        """Removes what has expired, of all owners."""
        now_s = time.time()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + min(SWEEP_PERIOD_S, self._config.ttl_s)
        for folder in self._folder.iterdir():
            if folder.is_dir() and not folder.is_symlink():
                for file in _files(folder):
                    if file.made_s + self._config.ttl_s <= now_s:
                        file.path.unlink(missing_ok=True)


def not_found(response_id: str) -> RequestNotFound:
    shown = response_id if ID.fullmatch(response_id) else "of this form"
    return RequestNotFound(
        f"there is no response {shown}; it may have expired, or belong to another key", code="response_not_found"
    )


def _files(folder: Path) -> Iterator[_File]:
    """Yields the files; leftovers of writes that were cut off, too, which have other names."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            yield _File(found.st_mtime, found.st_size, path)
