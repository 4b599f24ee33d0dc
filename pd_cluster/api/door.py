"""Accepts the connections at one listener, as its doorman allows, and hands them to the event loop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable

from pd_cluster.api.doorman import Doorman
from pd_cluster.api.front_door import GuardedProtocol
from pd_cluster.api.refusals import RefusalLog
from pd_cluster.api.tls import TlsFiles

MAX_AT_ONCE = 16  # accepted before the event loop gets on, and closes those that had to go
REST_S = 0.2  # when a connection could not be accepted
IPV6_PREFIX_LENGTH = 64  # of a subscriber, who has all addresses under it
OVER_BEFORE_IT_BEGAN = (errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.EINTR)


class Door:
    """Open from the beginning. Has the two methods that uvicorn calls on its asyncio servers."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], GuardedProtocol],
        doorman: Doorman,
        refusals: RefusalLog,
        tls: TlsFiles | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listener = listener
        self._descriptor = listener.fileno()
        self._family = listener.family
        self._at_once = 1
        self._make = make
        self._doorman = doorman
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
        self._at_once = 1  # asking when nobody waits costs as much as a connection
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
        """There are no descriptors or no memory left; an idle connection goes, and the loop does not spin."""
        self._refusals.note("", f"a connection could not be accepted: {error.strerror}")
        self._doorman.make_room()
        self._loop.remove_reader(self._descriptor)
        self._resting = self._loop.call_later(REST_S, self._open)

    def _let_in(self, connection: socket.socket, address: object) -> None:
        protocol = self._make()
        of = address_of(self._family, address)
        visit = self._doorman.admit(protocol, of, connection.fileno())
        if visit is None:
            self._refusals.note(of, "there are too many connections")
            connection.close()
            return
        protocol.visit = visit
        connection.setblocking(False)
        opening = self._loop.create_task(self._hand_over(protocol, connection))
        protocol.opening = opening
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _hand_over(self, protocol: GuardedProtocol, connection: socket.socket) -> None:
        """With TLS, when the handshake is done; the doorman may cancel it."""
        context = self._tls.context if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, ssl.SSLError):
                self._refusals.note(protocol.visit.address, f"TLS: {error.reason}")
            connection.close()
            self._doorman.left(protocol.visit)


def address_of(family: int, address: object) -> str:
    """What connections are counted by: an IPv4 address, the prefix of an IPv6 one; "" for others."""
    if family == socket.AF_INET and isinstance(address, tuple):
        return str(address[0])
    if family == socket.AF_INET6 and isinstance(address, tuple):
        found = ipaddress.IPv6Address(str(address[0]).partition("%")[0])
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.IPv6Network((found, IPV6_PREFIX_LENGTH), strict=False))
    return ""
