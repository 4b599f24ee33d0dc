"""One end of a socket pair between two ranks of an instance. Any thread may send messages; their order is kept."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from pd_cluster.errors import InstanceLost

log = logging.getLogger(__name__)

HEADER = struct.Struct("<I")
BUFFER_NBYTES = 4 << 20


class Channel:
    """`types`: the union of the messages that may be received.

    The other end must read them promptly, and never wait while it handles one. `timeout_s`: how long a message may wait
    for space in the socket's buffer.
    """

    def __init__(self, fd: int, types: Any, timeout_s: float) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES)
        timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(types)
        self._lock = threading.Lock()
        self.error: Exception | None = None  # the error that `handle` raised

    def start(self, name: str, handle: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """Passes every message to `handle`, on a separate thread; calls `ended` when the other end is gone."""

        def read() -> None:
            stream = self._socket.makefile("rb")
            try:
                while header := stream.read(HEADER.size):
                    handle(self._decoder.decode(stream.read(HEADER.unpack(header)[0])))
            except (OSError, struct.error, msgspec.DecodeError) as error:  # the peer died while it sent a message
                log.debug("%s: %s", name, error)
            except Exception as error:  # the top of this thread
                log.exception("%s: a message could not be handled", name)
                self.error = error
            ended()

        threading.Thread(target=read, name=name, daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message. Raises InstanceLost."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, data: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(HEADER.pack(len(data)) + data)
        except OSError as error:
            raise InstanceLost(f"another rank of this instance is gone: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._socket.close()


def encode(message: msgspec.Struct) -> bytes:
    """Encodes a message, so that `send_encoded` can send it over several channels."""
    return msgspec.msgpack.encode(message)
