"""The thread that reads features from one encoder, so that no step waits for it. Knows nothing of requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pd_cluster.errors import LinkError
from pd_cluster.transport.base import Checksum
from pd_cluster.transport.events import EncoderReached, EncoderUnreached, FeatureEvent, FeaturesRead
from pd_cluster.transport.features import fetch, reach


@dataclass(frozen=True, slots=True)
class _Wanted:
    item: int
    token: bytes
    checksum: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FeatureReader:
    """Reads in order; `report` gets an event for each item, and first whether the socket can be reached."""

    def __init__(
        self, conn: str, address: str, checksum: Checksum, timeout_s: float, report: Callable[[FeatureEvent], None]
    ) -> None:
        self._conn, self._address = conn, address
        self._checksum, self._timeout_s, self._report = checksum, timeout_s, report
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="features", daemon=True).start()

    def read(self, item: int, token: bytes, checksum: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Reads features of this shape and dtype; `FeaturesRead` follows, unless this is closed."""
        self._wanted.put(_Wanted(item, token, checksum, shape, dtype))

    def close(self) -> None:
        """Reads nothing more; returns at once, while the thread may still wait for its socket."""
        self._is_closed.set()
        self._wanted.put(None)

    def _run(self) -> None:
        try:
            reach(self._address, self._timeout_s)
        except LinkError as error:
            self._tell(EncoderUnreached(self._conn, str(error), error.retry))
            return
        self._tell(EncoderReached(self._conn))
        while (wanted := self._wanted.get()) is not None and not self._is_closed.is_set():
            self._tell(self._read(wanted))

    def _read(self, wanted: _Wanted) -> FeaturesRead:
        given = wanted.token, wanted.shape, wanted.dtype, self._checksum, wanted.checksum
        try:
            return FeaturesRead(wanted.item, fetch(self._address, *given, self._timeout_s))
        except LinkError as error:
            return FeaturesRead(wanted.item, None, str(error))

    def _tell(self, event: FeatureEvent) -> None:
        if not self._is_closed.is_set():
            self._report(event)
