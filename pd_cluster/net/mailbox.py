"""One process's ZeroMQ sockets, owned by one thread: a bound ROUTER, and a DEALER for each peer it connects to.

Delivers messages, notices peers that close or fall silent, sends heartbeats, drops mail for another epoch. Knows
nothing of requests or KV cache. Every frame is an authenticated CURVE frame. admission.py decides which key may open a
connection and which name its owner may use.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from pd_cluster import wire
from pd_cluster.errors import ConfigError, called
from pd_cluster.net import sockets
from pd_cluster.net.admission import Admission, peer_key
from pd_cluster.net.sockets import Connection, KeyPair, decode_key, open_dealer, open_router, receive
from pd_cluster.settings.config import Credentials
from pd_cluster.settings.processes import PortRange
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools.hosts import bracketed

log = logging.getLogger(__name__)

NOT_OPENED = "the connection did not open: nobody listens there"
CUT_SHORT = "the other end closed the connection while it opened: it has another key, or is another program"
NO_HANDSHAKE = "the other end said nothing while the connection opened: it stands still, or is another program"
NOT_ADMITTED = "the other end does not admit this process's key"
OTHER_SECRET = "the other end has another secret"
REFUSALS = (NOT_ADMITTED, OTHER_SECRET)  # between S and a worker these last as long as both live
BEAT_GAP_S = 0.02  # the minimum between two heartbeats that are sent soon
MAX_PENDING = 10_000  # messages kept while a connection opens


class Handler(Protocol):
    """Callbacks of a mailbox, made on its thread: they must return quickly and never block."""

    def on_opened(self, conn: str, peer: str, kind: str) -> None: ...
    def on_message(self, conn: str, peer: str, body: wire.Body) -> None: ...
    def on_closed(self, conn: str, peer: str, reason: str) -> None: ...
    def on_fatal(self, error: BaseException) -> None: ...
    def load(self) -> wire.Load | None: ...


class Mailbox:
    """Listens after `bind`, and connects to the peers that its owner names."""

    def __init__(
        self,
        name: str,
        epoch: int,
        kind: Literal["scheduler", "worker"],
        credentials: Credentials,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        admission: type[Admission] = Admission,
    ) -> None:
        self.name, self.epoch, self.kind = name, epoch, kind
        self.table = credentials.table  # the scheduler's changes while it runs
        self._keys = KeyPair.of(credentials.key)
        self._admission = admission(credentials, peer_key(name, epoch), self._keys.public)
        self._timeouts = timeouts
        self._handler: Handler
        self._clock = clock
        self._context = zmq.Context()
        self._router: Any = None
        self._connections: dict[str, Connection] = {}
        self._by_identity: dict[bytes, str] = {}
        self._commands: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = False  # a wake that the thread has not noticed yet
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._counter = itertools.count()
        self._stopping = False
        self._beaten_s, self._soon_s = -math.inf, math.inf  # the last heartbeat, and one that is wanted
        self._heard = threading.Condition()  # notified when a heartbeat came or a connection went
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=self)
        logging.getLogger("zmq.auth").setLevel(logging.ERROR)

    # ---- any thread

    @property
    def public_key(self) -> bytes:
        return self._keys.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Answers ZAP's question about a client's public key."""
        return self._admission.may_connect(decode_key(key))

    def bind(self, host: str, ports: PortRange, setting: str = "kv_port_range") -> int:
        """Binds the ROUTER, before `start()`. Returns the port. Raises ConfigError naming `setting` if none is free."""
        router = open_router(self._context, self._keys, host)
        for port in ports:
            try:
                router.bind(f"tcp://{bracketed(host)}:{port or '*'}")
                break
            except zmq.ZMQError as error:
                last = error
        else:
            raise ConfigError(f"cannot bind the control socket at {host} port {ports}: {last}; see {called(setting)}")
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def start(self, handler: Handler) -> None:
        """From now on what happens is told to this one."""
        self._handler = handler
        self._thread.start()

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        """Opens a connection to the owner of this public key; returns its id.

        `on_opened` or `on_closed` follows within the connect timeout.
        """
        conn = f"{self.name}@{self.epoch:x}#{next(self._counter)}"
        self._call(lambda: self._connect(conn, name, epoch, host, port, key))
        return conn

    def beat(self) -> None:
        """Sends a heartbeat now, because others wait for a change that it reports."""
        self._call(self._beat)

    def beat_soon(self) -> None:
        """Sends schedulers a heartbeat, at most BEAT_GAP_S from now; wishes within that time share one."""
        self._call(self._plan_beat)

    def disconnect(self, conn: str) -> None:
        """Closes without notifying the owner."""
        self._call(lambda: self._drop(conn))

    def send(self, conn: str, body: wire.Body) -> None:
        """Queues a message. One for a closed connection is dropped; its `on_closed` reports that."""
        encoded = wire.encode_body(body)
        self._call(lambda: self._send(conn, encoded))

    def await_heard(self, timeout_s: float) -> bool:
        """Waits until the peers of all open connections have reported that they received what was sent to them.

        A socket that is closed may discard what its peer has not read. Returns whether all have, within the timeout.
        """
        with self._heard:
            return self._heard.wait_for(self._is_heard, timeout_s)

    def close(self) -> None:
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._auth.stop()
        self._context.destroy(linger=0)

    def _call(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._is_woken:  # the thread will still read the commands: it resets this before
            return
        self._is_woken = True
        os.eventfd_write(self._wake_fd, 1)

    # ---- the mailbox's thread

    def _run(self) -> None:
        try:
            next_beat_s = self._clock()
            while not self._stopping:
                wait_s = max(0.0, min(next_beat_s, self._soon_s) - self._clock())
                events = dict(self._poller.poll(int(wait_s * 1000) + 1))
                before_s = self._clock()
                if self._wake_fd in events:
                    os.eventfd_read(self._wake_fd)
                self._is_woken = False  # after the read, which would swallow a wake that follows
                self._run_commands()
                self._receive(events)
                if before_s >= next_beat_s:
                    self._check_silence(paused_s=before_s - next_beat_s)
                    self._beat()
                    next_beat_s = self._clock() + self._timeouts.heartbeat_interval_s
                elif before_s >= self._soon_s:
                    self._beat(to_workers=False)
            self._run_commands()
        except BaseException as error:
            self._handler.on_fatal(error)
            raise

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _receive(self, events: dict[Any, int]) -> None:
        if self._router in events:
            self._receive_router()
        for connection in list(self._connections.values()):
            if connection.socket is None:
                continue
            if connection.socket in events:
                self._receive_dealer(connection)
            if connection.monitor in events:
                self._read_monitor(connection)

    def _receive_router(self) -> None:
        for _ in range(1000):
            try:
                identity, key, frames = receive(self._router)
            except zmq.Again:
                return
            envelope = self._decode(frames)
            if envelope is None:
                continue
            conn = self._by_identity.get(identity)
            if conn is None and isinstance(envelope.body, wire.Hello):
                conn = self._accept(identity, key, envelope, envelope.body)
            if conn is not None:
                if self._connections[conn].peer_key == key:  # clients choose their identity themselves
                    self._deliver(self._connections[conn], envelope)
            elif not isinstance(envelope.body, wire.Hello):
                self._say_gone(identity, envelope)

    def _say_gone(self, identity: bytes, envelope: wire.Envelope) -> None:
        """Replies to a peer that still uses a connection given up here, so that it does not wait in vain."""
        frame = wire.seal(self.name, self.epoch, envelope.from_epoch, wire.encode_body(wire.Gone()))
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone, too
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)

    def _accept(self, identity: bytes, key: bytes, envelope: wire.Envelope, hello: wire.Hello) -> str | None:
        peer = peer_key(envelope.from_name, envelope.from_epoch)
        if hello.version != wire.PROTOCOL_VERSION:
            log.error("%s speaks protocol %d, this is %d: not accepted", peer, hello.version, wire.PROTOCOL_VERSION)
            return None
        if not self._admission.admits(key, peer, hello.kind):
            log.error("%s claims to be a %s, but its key belongs to another process: not accepted", peer, hello.kind)
            return None
        conn = f"in:{identity.decode(errors='replace')}"
        self._connections[conn] = Connection(
            conn, peer, envelope.from_epoch, self._clock(), identity, key, kind=hello.kind, is_open=True
        )
        self._by_identity[identity] = conn
        welcome = wire.encode_body(wire.Welcome(self._admission.proof_to(peer, key), self.table))
        self._send_frame(self._connections[conn], self._seal(self._connections[conn], welcome))
        if conn not in self._connections:
            return None
        self._handler.on_opened(conn, peer, hello.kind)
        return conn

    def _receive_dealer(self, connection: Connection) -> None:
        for _ in range(1000):
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = self._decode(frames)
            if envelope is not None:
                self._deliver(connection, envelope)
            if connection.id not in self._connections:
                return

    def _decode(self, frames: list[bytes]) -> wire.Envelope | None:
        try:
            (frame,) = frames
            envelope = wire.decode(frame)
        except (ValueError, RecursionError, msgspec.DecodeError) as error:
            log.warning("dropped a frame that is not a message: %s", error)
            return None
        return envelope if envelope.to_epoch == self.epoch else None

    def _deliver(self, connection: Connection, envelope: wire.Envelope) -> None:
        if envelope.from_epoch != connection.epoch:
            return
        connection.last_seen_s = self._clock()
        match envelope.body:
            case wire.Gone():
                self._lose(connection, "the other end has given the connection up")
            case wire.Welcome(proof, table) if not connection.is_open:
                self._welcomed(connection, proof, table)
            case wire.Hello() | wire.Welcome():
                pass
            case body if connection.is_open:
                if isinstance(body, wire.Heartbeat):
                    connection.num_heard = body.num_heard
                    self._tell_waiting()
                else:
                    connection.num_received += 1
                if isinstance(body, wire.Peers) and connection.kind == "scheduler":
                    self._admission.hear(body.peers)
                self._handler.on_message(connection.id, connection.peer, body)

    def _connect(self, conn: str, name: str, epoch: int, host: str, port: int, key: bytes) -> None:
        timeout_s = self._timeouts.connect_timeout_s
        socket, monitor = open_dealer(self._context, self._keys, key, conn.encode(), host, timeout_s)
        connection = Connection(
            conn, peer_key(name, epoch), epoch, self._clock(), peer_key=key, socket=socket, monitor=monitor
        )
        self._connections[conn] = connection
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            socket.connect(f"tcp://{bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self._lose(connection, f"cannot connect to {host}:{port}: {error}")

    def _read_monitor(self, connection: Connection) -> None:
        while connection.id in self._connections:
            try:
                event = recv_monitor_message(connection.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet(connection)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._lose(connection, NOT_ADMITTED)
            elif connection.is_open:
                self._lose(connection, "the connection was closed")
            else:
                self._lose(connection, self._why_not_opened(connection, event))

    def _why_not_opened(self, connection: Connection, event: int) -> str:
        if event != zmq.EVENT_DISCONNECTED:
            return NOT_OPENED
        waited_s = self._clock() - connection.last_seen_s  # since it began to open
        return NO_HANDSHAKE if waited_s >= sockets.HANDSHAKE_TIMEOUT_S else CUT_SHORT

    def _greet(self, connection: Connection) -> None:
        hello = self._seal(connection, wire.encode_body(wire.Hello(kind=self.kind)))
        try:
            connection.socket.send(hello, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(connection, f"the connection was closed: {error}")

    def _welcomed(self, connection: Connection, proof: bytes, table: bytes) -> None:
        if not self._admission.is_proof(proof, connection.peer, connection.peer_key):
            self._lose(connection, OTHER_SECRET)
            return
        if self.kind == "scheduler" and self.table and table and table != self.table:
            log.warning("%s was started with another global rank table than the scheduler's", connection.peer)
        connection.is_open = True
        connection.last_seen_s = self._clock()
        pending, connection.pending = connection.pending, []
        for frame in pending:
            self._send_frame(connection, frame)
        self._handler.on_opened(connection.id, connection.peer, connection.kind)

    def _send(self, conn: str, encoded: msgspec.Raw) -> None:
        connection = self._connections.get(conn)
        if connection is not None:
            connection.num_sent += 1
            self._send_frame(connection, self._seal(connection, encoded))

    def _seal(self, connection: Connection, encoded: msgspec.Raw) -> bytes:
        return wire.seal(self.name, self.epoch, connection.epoch, encoded)

    def _send_frame(self, connection: Connection, frame: bytes) -> None:
        if not connection.is_open:
            connection.pending.append(frame)
            if len(connection.pending) > MAX_PENDING:
                self._lose(connection, "too much is queued for a connection that does not open")
            return
        try:
            if connection.socket is not None:
                connection.socket.send(frame, zmq.NOBLOCK)
            else:
                self._router.send_multipart([connection.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            if connection.socket is not None:
                self._read_monitor(connection)  # a socket whose peer is gone accepts nothing, either
            if connection.id in self._connections:
                self._lose(connection, f"it does not read: {sockets.HIGH_WATER_MARK} messages are queued")
        except zmq.ZMQError as error:
            self._lose(connection, "the connection was closed" if error.errno == zmq.EHOSTUNREACH else str(error))

    def _check_silence(self, paused_s: float) -> None:
        """Drops connections that were silent for too long.

        `paused_s`: how long this process itself stood still. After a short pause, silence proves nothing; after a long
        one, the others have given this process up.
        """
        now_s = self._clock()
        if paused_s > self._timeouts.dead_after_s:
            for connection in list(self._connections.values()):
                self._lose(connection, f"this process stood still for {paused_s:.1f} s")
            return
        forgive = paused_s > self._timeouts.dead_after_s / 2
        for connection in list(self._connections.values()):
            limit_s = self._timeouts.dead_after_s if connection.is_open else self._timeouts.connect_timeout_s
            if forgive:
                connection.last_seen_s = now_s
            elif now_s - connection.last_seen_s > limit_s:
                self._lose(connection, f"nothing heard for {now_s - connection.last_seen_s:.1f} s")

    def _plan_beat(self) -> None:
        self._soon_s = min(self._soon_s, self._beaten_s + BEAT_GAP_S)

    def _beat(self, to_workers: bool = True) -> None:
        load = self._handler.load()
        self._beaten_s, self._soon_s = self._clock(), math.inf
        for connection in list(self._connections.values()):
            if connection.is_open and (to_workers or connection.kind == "scheduler"):
                heartbeat = wire.encode_body(wire.Heartbeat(load=load, num_heard=connection.num_received))
                self._send_frame(connection, self._seal(connection, heartbeat))

    def _is_heard(self) -> bool:
        waiting = [each for each in list(self._connections.values()) if each.is_open and each.num_heard < each.num_sent]
        return not waiting and not self._commands

    def _tell_waiting(self) -> None:
        with self._heard:
            self._heard.notify_all()

    def _lose(self, connection: Connection, reason: str) -> None:
        if self._drop(connection.id):
            self._handler.on_closed(connection.id, connection.peer, reason)

    def _drop(self, conn: str) -> bool:
        connection = self._connections.pop(conn, None)
        if connection is None:
            return False
        self._by_identity.pop(connection.identity, None)
        self._tell_waiting()
        if connection.socket is not None:
            self._poller.unregister(connection.socket)
            self._poller.unregister(connection.monitor)
            connection.socket.disable_monitor()
            connection.socket.close(linger=0)
        return True
