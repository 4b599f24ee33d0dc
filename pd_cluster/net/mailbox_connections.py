"""Keeps the open connections of one mailbox: finds them, sends over them, and drops lost ones.

Used on the mailbox's thread. Knows nothing of how a connection opens, or of when its peer is presumed dead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import zmq

from pd_cluster import wire
from pd_cluster.net.zmq_sockets import HIGH_WATER_MARK, Connection, next_event

CLOSED = "the connection was closed"
MAX_PENDING = 10_000  # messages kept while a connection opens


class Handler(Protocol):
    """Callbacks of a mailbox, called on its thread: they must return quickly and never block."""

    def on_opened(self, conn: str, peer: str, kind: str) -> None: ...
    def on_message(self, conn: str, peer: str, body: wire.Body) -> None: ...
    def on_closed(self, conn: str, peer: str, reason: str) -> None: ...
    def on_fatal(self, error: BaseException) -> None: ...
    def load(self) -> wire.Load | None: ...


class Connections:
    """The connections of the process with this name and epoch.

    `router` and `handler` are set before the first connection opens.
    """

    router: Any
    handler: Handler

    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.poller = zmq.Poller()
        self.changed = threading.Condition()  # notified when a heartbeat arrives or a connection is lost
        self._by_id: dict[str, Connection] = {}
        self._by_identity: dict[bytes, Connection] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_id.values()))  # a copy, because loops over the connections may drop some of them

    def __contains__(self, connection: Connection) -> bool:
        return connection.id in self._by_id

    def get(self, conn: str) -> Connection | None:
        return self._by_id.get(conn)

    def arrived(self, identity: bytes) -> Connection | None:
        """Returns the connection that arrived at the ROUTER with this identity."""
        return self._by_identity.get(identity)

    def add(self, connection: Connection) -> None:
        self._by_id[connection.id] = connection
        if connection.socket is None:
            self._by_identity[connection.identity] = connection
        else:
            self.poller.register(connection.socket, zmq.POLLIN)
            self.poller.register(connection.monitor, zmq.POLLIN)

    def send(self, connection: Connection, encoded: msgspec.Raw) -> None:
        """Sends a message, or queues it until the connection is open. A peer that does not read is dropped."""
        self.send_frame(connection, self.seal(connection, encoded))

    def seal(self, connection: Connection, encoded: msgspec.Raw) -> bytes:
        return wire.seal(self.name, self.epoch, connection.epoch, encoded)

    def send_frame(self, connection: Connection, frame: bytes) -> None:
        if not connection.is_open:
            connection.pending.append(frame)
            if len(connection.pending) > MAX_PENDING:
                self.lose(connection, "too many messages are queued for a connection that does not open")
            return
        try:
            if connection.socket is not None:
                connection.socket.send(frame, zmq.NOBLOCK)
            else:
                self.router.send_multipart([connection.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            if connection.socket is not None:
                self.check_closed(connection)  # a socket also refuses messages if its peer is gone
            if connection in self:
                self.lose(connection, f"the peer does not read: {HIGH_WATER_MARK} messages are queued")
        except zmq.ZMQError as error:
            self.lose(connection, CLOSED if error.errno == zmq.EHOSTUNREACH else str(error))

    def send_gone(self, identity: bytes, envelope: wire.Envelope, reason: str = "") -> None:
        """Tells a peer that its connection is closed or was not admitted, so that it does not wait in vain."""
        gone = wire.Gone(reason[: wire.MOST_TEXT])
        frame = wire.seal(self.name, self.epoch, envelope.from_epoch, wire.encode_body(gone))
        with contextlib.suppress(zmq.ZMQError):  # the peer may be gone
            self.router.send_multipart([identity, frame], zmq.NOBLOCK)

    def check_closed(self, connection: Connection) -> None:
        """Drops an open connection whose monitor reports an event, which can only mean that the socket was closed."""
        if next_event(connection.monitor) is not None:
            self.lose(connection, CLOSED)

    def lose(self, connection: Connection, reason: str) -> None:
        if self.drop(connection.id):
            self.handler.on_closed(connection.id, connection.peer, reason)

    def drop(self, conn: str) -> bool:
        """Closes a connection without notifying its owner. Returns whether it existed."""
        connection = self._by_id.pop(conn, None)
        if connection is None:
            return False
        self._by_identity.pop(connection.identity, None)
        self.notify_waiting()
        if connection.socket is not None:
            self.poller.unregister(connection.socket)
            self.poller.unregister(connection.monitor)
            connection.socket.disable_monitor()
            connection.monitor.close(linger=0)
            connection.socket.close(linger=0)
        return True

    def notify_waiting(self) -> None:
        with self.changed:
            self.changed.notify_all()
