"""Serves data over an abstract Unix socket to processes of the same user and host that know the socket's random name.

The socket is in no file system, and disappears with its process. Knows nothing of the data.
"""

from __future__ import annotations

import abc
import contextlib
import os
import secrets
import socket
import struct
import threading
from collections import deque

from pd_cluster.errors import LinkError

ACCEPT_PAUSE_S = 0.1
MAX_KEPT = 1024  # the most connections that are kept open; the oldest is dropped first


class UnixServer(abc.ABC):
    """Serves with one thread.

    `keeps`: connections stay open as long as this process lives, so that peers notice its end.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.name = f"pd-cluster-kv-{secrets.token_hex(16)}"
        self._kept: deque[socket.socket] | None = deque(maxlen=MAX_KEPT) if keeps else None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen(128)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-pool-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(timeout=5)
        for peer in self._kept or ():
            peer.close()

    @abc.abstractmethod
    def _give(self, peer: socket.socket) -> None:
        """Sends the data to a process of the same user. Raises OSError."""

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:  # the listener is closed, or no descriptor is free at the moment
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                continue
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                stack.enter_context(peer)
                peer.settimeout(5)
                if peer_uid(peer) == os.getuid():
                    self._give(peer)
                    if self._kept is not None:
                        stack.pop_all()
                        self._keep(peer)

    def _keep(self, peer: socket.socket) -> None:
        assert self._kept is not None
        for other in [each for each in self._kept if has_hung_up(each)]:
            self._kept.remove(other)
            other.close()
        self._kept.append(peer)


def connect(name: str, what: str, timeout_s: float, role: str = "prefill instance") -> socket.socket:
    """Connects to the server with this name. Raises a LinkError that names what the server serves and its role."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(timeout_s)
        peer.connect(f"\0{name}")
        uid = peer_uid(peer)
    except OSError as error:
        peer.close()
        other_host = isinstance(error, ConnectionRefusedError)  # or it is in another network namespace
        raise LinkError(f"the {role}'s {what} cannot be reached: {error}", retry=not other_host) from error
    if uid != os.getuid():
        peer.close()
        raise LinkError(f"the {role}'s {what} belongs to another user")
    return peer


def has_hung_up(peer: socket.socket) -> bool:
    """Whether the other end is closed or its process is dead. Call it only if the other end sends no more."""
    peer.setblocking(False)
    try:
        return not peer.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def peer_uid(peer: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
