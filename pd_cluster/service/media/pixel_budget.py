"""Limits the memory of images whose prompts are not answered yet. Knows nothing of their contents.

Beyond the limit, pixels are written to files, if a folder is set: unnamed files of mode 0600, mapped into memory, which
vanish when the request ends.
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

from pd_cluster.errors import ConfigError, NoCapacity, RequestError
from pd_cluster.service.concurrency.fair_byte_budget import FairByteBudget
from pd_cluster.service.concurrency.fair_slots import current_client
from pd_cluster.types import Image

MAX_HELD_NBYTES = 2 << 30  # pixels are held until the answer ends, because a retry elsewhere needs them


class PixelBudget:
    """Counts the bytes of all images that this process holds, in memory and in files of a folder, if any."""

    def __init__(self, most: int = MAX_HELD_NBYTES, folder: str = "", most_in_files: int = 0) -> None:
        """Raises ConfigError for a folder in which no file can be created."""
        self._folder = folder
        self.in_memory, self.in_files = _Shares(most), _Shares(most_in_files if folder else 0)
        if folder:
            try:
                os.close(nameless_file(folder))
            except OSError as error:
                raise ConfigError(f"--media-spill-path {folder}: no file can be made there: {error.strerror}") from None

    def take(self, nbytes: int) -> PixelHold:
        """Takes memory.

        Raises NoCapacity if the current client's share is used up, RequestError if all memory together is too small.
        """
        client, memory = current_client.get(), self.in_memory
        if not memory.has_capacity(client, nbytes):
            if not memory.taken_nbytes:
                raise RequestError(
                    f"{nbytes} bytes of pictures are more than this server holds; send fewer or smaller ones"
                )
            raise NoCapacity(
                f"{memory.taken_nbytes} bytes of pictures belong to unfinished requests, {memory.of(client)} of them "
                f"yours; try again"
            )
        return PixelHold(memory, client, nbytes)

    async def hold(self, images: Sequence[Image]) -> tuple[tuple[Image, ...], PixelHold]:
        """Returns the images, with pixels in memory or in a file, and their PixelHold. Raises NoCapacity."""
        nbytes = sum(len(image.pixels) for image in images)
        client = current_client.get()
        if self.in_memory.has_capacity(client, nbytes) or not self.in_files.has_capacity(client, nbytes):
            return tuple(images), self.take(nbytes)
        held = PixelHold(self.in_files, client, nbytes)
        try:
            return await asyncio.to_thread(_in_file, images, self._folder), held
        except OSError as error:
            held.release()
            raise NoCapacity(f"pictures cannot be kept in a file: {error.strerror}; try again") from None


class _Shares(FairByteBudget):
    def has_capacity(self, client: str, nbytes: int) -> bool:
        """Whether the client may take this many more bytes; a caller in this process, "", may take all memory."""
        return super().has_capacity(client, nbytes + (0 if client else -self.of("")))


class PixelHold:
    """Bytes of images that a prompt holds until it is answered."""

    def __init__(self, shares: FairByteBudget, client: str, nbytes: int) -> None:
        self._shares: FairByteBudget | None = shares
        self._client, self._nbytes = client, nbytes
        shares.take(client, nbytes)

    def release(self) -> None:
        """Releases the bytes; further calls do nothing."""
        if self._shares is not None:
            self._shares.give_back(self._client, self._nbytes)
            self._shares = None

    def __del__(self) -> None:
        self.release()


def _in_file(images: Sequence[Image], folder: str) -> tuple[Image, ...]:
    """Writes all pixels to one file, and returns images that map it. Raises OSError."""
    descriptor = nameless_file(folder)
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


def nameless_file(folder: str) -> int:
    """Opens an unnamed file of mode 0600. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # the file system has no unnamed files
        descriptor, name = tempfile.mkstemp(prefix="pd-cluster-media-", dir=folder)
        Path(name).unlink()
        return descriptor
