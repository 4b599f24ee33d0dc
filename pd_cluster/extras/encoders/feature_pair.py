"""Sends images' features between hosts over a pair: an encoder sends, a prefill instance receives.

The ends meet by exchanging keys over their connection (meeting.py), so no other process can take part. Payloads arrive
in pieces, in the order in which the connection announces them. Any fault or timeout ends the pair, so that payloads are
never mixed up. Contents are checked against the announced checksums; gloo does not encrypt them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from pd_cluster.devices.device import CPU
from pd_cluster.errors import LinkError, first_line
from pd_cluster.extras.encoders.feature_files import PAIRS, FeatureEndpoint, SealedFile
from pd_cluster.transport.device_pair import RECEIVER, SENDER, PairEndpoint, close_group, make_group
from pd_cluster.transport.meeting import Meeting
from pd_cluster.transport.transport_interface import buffer_of
from pd_cluster.wire import TransportName

PIECE_NBYTES = 8 << 20


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields the offset and the length of each piece."""
    for at in range(0, nbytes, PIECE_NBYTES):
        yield at, min(PIECE_NBYTES, nbytes - at)


class PairSender:
    """The encoder's end. `post` sends one of the meeting's keys.

    If the pair fails, its thread calls `failed` with the reason.
    """

    def __init__(
        self,
        name: str,
        transport: TransportName,
        place: FeatureEndpoint,
        post: Callable[[str, bytes], None],
        failed: Callable[[str], None],
    ) -> None:
        self.name = name
        self.transport = transport
        self.meeting = Meeting(place.connect_s, post)
        self.sent_nbytes = 0
        self._place = place
        self._failed = failed
        self._files: queue.SimpleQueue[SealedFile | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._num_waiting = 0
        self.is_open = False

    def __len__(self) -> int:
        """Counts files that have not been sent yet."""
        return self._num_waiting

    def open(self) -> None:
        """Meets the other end, and then starts to send. Only the first call has an effect."""
        if not self.is_open:
            self.is_open = True
            threading.Thread(target=self._run, name="feature-pair", daemon=True).start()

    def put(self, file: SealedFile) -> None:
        """Takes ownership of a file, and sends it after the earlier ones."""
        self._num_waiting += 1
        self._files.put(file)

    def close(self) -> None:
        self._is_closed.set()
        self._files.put(None)

    def _run(self) -> None:
        group: Any = None
        try:
            group = _make(self.name, self.transport, self.meeting, SENDER, self._place)
            while (file := self._files.get()) is not None and not self._is_closed.is_set():
                try:
                    self._send(group, file)
                finally:
                    file.close()
                self._num_waiting -= 1
                self.sent_nbytes += file.nbytes
        except (LinkError, RuntimeError, OSError) as error:
            if not self._is_closed.is_set():
                self._failed(first_line(error))
        finally:
            close_group(group)
            self._drop()

    def _send(self, group: Any, file: SealedFile) -> None:
        buffer = torch.empty(min(PIECE_NBYTES, file.nbytes), dtype=torch.uint8)
        for at, length in pieces(file.nbytes):
            piece = buffer[:length]
            if os.preadv(file.fd, [buffer_of(piece)], at) != length:
                raise OSError("a file of features is truncated")
            group.send([piece], RECEIVER, 0).wait(timedelta(seconds=self._place.transfer_s))

    def _drop(self) -> None:
        while True:
            try:
                file = self._files.get_nowait()
            except queue.Empty:
                return
            if file is not None:
                file.close()


class PairReceiver:
    """The prefill instance's end. Only one thread uses it."""

    def __init__(self, name: str, transport: TransportName, meeting: Meeting, place: FeatureEndpoint) -> None:
        """Waits until the other end is connected. Raises LinkError."""
        self._timeout = timedelta(seconds=place.transfer_s)
        self._group = _make(name, transport, meeting, RECEIVER, place)

    def receive(self, nbytes: int) -> torch.Tensor:
        """Returns the bytes of the next payload. Raises LinkError if the pair is unusable."""
        payload = torch.empty(nbytes, dtype=torch.uint8)
        try:
            for at, length in pieces(nbytes):
                self._group.recv([payload[at : at + length]], SENDER, 0).wait(self._timeout)
        except RuntimeError as error:
            raise LinkError(f"receiving features failed: {first_line(error)}", retry=True) from error
        return payload

    def close(self) -> None:
        close_group(self._group)


def _make(name: str, transport: TransportName, meeting: Meeting, rank: int, place: FeatureEndpoint) -> Any:
    """Raises LinkError."""
    if transport not in PAIRS:
        raise LinkError(f"features cannot be sent over {transport!r}")
    return make_group(PAIRS[transport], meeting, name, rank, PairEndpoint(place.host, place.connect_s, CPU))
