"""Bounds the memory of pictures whose prompts are not answered yet. Knows nothing of what is in them.

Beyond the limit, pixels go to files if there is a folder for them: of mode 0600, without a name from the moment they
are opened, mapped into memory, and gone with the request.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from msgspec import structs

from pd_cluster.errors import ConfigError, NoRoom
from pd_cluster.types import Image

MAX_HELD_NBYTES = 2 << 30  # kept in case an instance is lost


class PixelBudget:
    """Counts the bytes of all pictures that this process holds, in memory and in files of a folder, if any."""

    def __init__(self, most: int = MAX_HELD_NBYTES, folder: str = "", most_in_files: int = 0) -> None:
        """Raises ConfigError for a folder in which no file can be made."""
        self.nbytes = self.nbytes_in_files = 0
        self._most, self._folder, self._most_in_files = most, folder, most_in_files if folder else 0
        if folder:
            try:
                os.close(_nameless(folder))
            except OSError as error:
                raise ConfigError(f"--media-spill-path {folder}: no file can be made there: {error.strerror}") from None

    def take(self, nbytes: int) -> PixelHold:
        """Raises NoRoom if there is no room in memory."""
        if self.nbytes + nbytes > self._most:
            raise NoRoom(f"{self.nbytes} bytes of pictures are waiting for their answers; try again")
        return PixelHold(self, nbytes)

    async def hold(self, images: Sequence[Image]) -> tuple[tuple[Image, ...], PixelHold]:
        """Returns the images, with pixels in memory or in a file, and their place. Raises NoRoom without room."""
        nbytes = sum(len(image.pixels) for image in images)
        in_memory = self.nbytes + nbytes <= self._most
        if in_memory or self.nbytes_in_files + nbytes > self._most_in_files:
            return tuple(images), self.take(nbytes)
        held = PixelHold(self, nbytes, in_file=True)
        try:
            return await asyncio.to_thread(_in_file, images, self._folder), held
        except OSError as error:
            held.release()
            raise NoRoom(f"pictures cannot be kept in a file: {error.strerror}; try again") from None


class PixelHold:
    """Bytes of pictures that a prompt keeps until it is answered."""

    def __init__(self, budget: PixelBudget, nbytes: int, in_file: bool = False) -> None:
        self._budget: PixelBudget | None = budget
        self._nbytes, self._in_file = nbytes, in_file
        self._count(nbytes)

    def release(self) -> None:
        """Further calls do nothing."""
        if self._budget is not None:
            self._count(-self._nbytes)
            self._budget = None

    def _count(self, nbytes: int) -> None:
        assert self._budget is not None
        if self._in_file:
            self._budget.nbytes_in_files += nbytes
        else:
            self._budget.nbytes += nbytes

    def __del__(self) -> None:
        self.release()


def _in_file(images: Sequence[Image], folder: str) -> tuple[Image, ...]:
    """Writes all pixels to one file, and returns images that read them from there. Raises OSError."""
    descriptor = _nameless(folder)
    with os.fdopen(descriptor, "w+b") as file:
        for image in images:
            file.write(image.pixels)
        file.flush()
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    found, start = [], 0
    for image in images:
        stop = start + len(image.pixels)
        found.append(structs.replace(image, pixels=cast(bytes, mapped[start:stop])))
        start = stop
    return tuple(found)


def _nameless(folder: str) -> int:
    """Opens a file of mode 0600 that no path leads to. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # file systems that have none
        descriptor, name = tempfile.mkstemp(prefix="pd-cluster-media-", dir=folder)
        Path(name).unlink()
        return descriptor
