"""Accepts one socket's connections, if the connection limiter admits them, and passes them to the event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

from pd_cluster.api.connections.connection_limiter import ConnectionLimiter
from pd_cluster.api.connections.http_protocol import GuardedProtocol
from pd_cluster.api.connections.refusals import RefusalLog
from pd_cluster.api.connections.subscriber import subscriber_of
from pd_cluster.net.tls_files import TlsFiles

MAX_AT_ONCE = 16  # connections accepted before the event loop runs and closes the evicted ones
REST_S = 0.2  # pause after a failure to accept
OVER_BEFORE_IT_BEGAN = (errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.EINTR)


class Listener:
    """Accepts as soon as it is created. Has the two methods that uvicorn calls on its asyncio servers."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], GuardedProtocol],
        limiter: ConnectionLimiter,
        refusals: RefusalLog,
        tls: TlsFiles | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listener = listener
        self._descriptor = listener.fileno()
        self._family = listener.family
        self._at_once = 1
        self._make = make
        self._limiter = limiter
        self._refusals = refusals
        self._tls = tls
        self._loop = loop
        self._opening: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._descriptor)

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _open(self) -> None:
        self._resting = None
        self._loop.add_reader(self._descriptor, self._accept_waiting)

    def _accept_waiting(self) -> None:
        most = self._at_once
        self._at_once = 1  # adaptive, because a call that finds no waiting connection costs as much as one that does
        for _ in range(most):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in OVER_BEFORE_IT_BEGAN:
                    self._rest(error)
                    return
            else:
                self._let_in(connection, address)
        self._at_once = min(2 * most, MAX_AT_ONCE)

    def _rest(self, error: OSError) -> None:
        """Pauses accepting for lack of descriptors or memory, instead of spinning, and evicts an idle connection."""
        self._refusals.note("", f"a connection could not be accepted: {error.strerror}")
        self._limiter.evict_idle()
        self._loop.remove_reader(self._descriptor)
        self._resting = self._loop.call_later(REST_S, self._open)

    def _let_in(self, connection: socket.socket, address: object) -> None:
        protocol = self._make()
        of = address_of(self._family, address)
        admitted = self._limiter.admit(protocol, of, connection.fileno())
        if admitted is None:
            self._refusals.note(of, "there are too many connections")
            connection.close()
            return
        protocol.admitted = admitted
        connection.setblocking(False)
        opening = self._loop.create_task(self._hand_over(protocol, connection))
        protocol.opening = opening
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _hand_over(self, protocol: GuardedProtocol, connection: socket.socket) -> None:
        """Passes a connection to the loop; with TLS, after the handshake, which the limiter may cancel."""
        context = self._tls.context if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, ssl.SSLError):
                self._refusals.note(protocol.admitted.address, f"TLS: {error.reason}")
            connection.close()
            self._limiter.left(protocol.admitted)


def address_of(family: int, address: object) -> str:
    """Returns the key for counting connections: an IPv4 address, an IPv6 prefix; "" for others."""
    if family in (socket.AF_INET, socket.AF_INET6) and isinstance(address, tuple):
        return subscriber_of(str(address[0]))
    return ""
