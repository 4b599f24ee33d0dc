"""Owns one process's ZeroMQ sockets, on one thread: a bound ROUTER, and a DEALER for each peer that it connects to.

Delivers messages, detects silent peers, sends heartbeats, and drops messages for another epoch. connection_handshake.py
opens connections; mailbox_connections.py holds the open ones. Knows nothing of requests or KV cache. Every frame is an
authenticated CURVE frame.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from pd_cluster import wire
from pd_cluster.errors import ConfigError, called
from pd_cluster.host import raise_open_files
from pd_cluster.net.connection_handshake import Handshake, LocalIdentity
from pd_cluster.net.mailbox_connections import Connections, Handler
from pd_cluster.net.map_deltas import DeltaLost
from pd_cluster.net.node_trust import NODE_REFUSED, READ_AGAIN_S, node_trust, plain
from pd_cluster.net.payload_channel import PayloadSender
from pd_cluster.net.peer_admission import Admission, Life, peer_key
from pd_cluster.net.zmq_sockets import Connection, KeyPair, decode_key, new_context, open_router, receive
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools.host_addresses import bracketed

log = logging.getLogger(__name__)

WANTED_FILES = 65_536  # descriptors; each peer takes five
OUT_OF_ORDER = "a delta does not follow the last one received"
BEAT_GAP_S = 0.02  # the minimum time between two heartbeats that were requested early


class Mailbox:
    """Listens after `bind`, and connects to the peers that its owner names."""

    def __init__(
        self,
        life: Life,
        kind: Literal["scheduler", "worker"],
        credentials: Credentials,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        admission: type[Admission] = Admission,
    ) -> None:
        self.name, self.epoch = life
        self.table = credentials.table  # the scheduler's table changes while it runs
        self._keys = KeyPair.of(credentials.key)
        own = peer_key(*life)
        self._admission = admission(credentials, own, self._keys.public)
        self._nodes = node_trust(credentials, own, self._keys.private, self._keys.public)
        self._timeouts = timeouts
        self._clock = clock
        raise_open_files(WANTED_FILES)
        self._context = new_context()
        self._router: Any = None
        self._connections = Connections(*life)
        self._opening = Handshake(
            self._connections,
            LocalIdentity(kind, self._keys, self._admission, self._nodes),
            lambda: self.table,
            timeouts.connect_timeout_s,
            clock,
        )
        self._commands: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # guards `_wake_fd`, whose number may belong to another file after a close
        self._is_woken = False  # a wake-up that the thread has not processed yet
        self._poller = self._connections.poller
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._counter = itertools.count()
        self._nodes_due_s = -math.inf
        self._stopping = False
        # when the last heartbeat was sent, and when the next requested one is due
        self._beaten_s, self._soon_s = -math.inf, math.inf
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._auth = ThreadAuthenticator(self._context)
        try:
            self._auth.start()
            self._auth.configure_curve_callback(domain="*", credentials_provider=self)
        except BaseException:
            self.close()
            raise
        logging.getLogger("zmq.auth").setLevel(logging.ERROR)

    # ---- any thread

    @property
    def public_key(self) -> bytes:
        return self._keys.public

    def payload_sender(self) -> PayloadSender:
        """Returns the sending end of a payload channel. Its receiver must accept this process's public key."""
        return PayloadSender(self._keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Answers ZAP's question about a client's public key."""
        return self._admission.may_connect(decode_key(key))

    def bind(self, host: str, ports: PortRange, setting: str = "kv_port_range") -> int:
        """Binds the ROUTER, before `start()`, and returns the port. Raises ConfigError naming `setting` if no port is
        free.
        """
        router = open_router(self._context, self._keys, host)
        for port in ports:
            try:
                router.bind(f"tcp://{bracketed(host)}:{port or '*'}")
                break
            except zmq.ZMQError as error:
                last = error
        else:
            away = last.errno == errno.EADDRNOTAVAIL
            why = (
                f"{host} is not an address of this host: is the local rank table another host's?" if away else str(last)
            )
            raise ConfigError(f"cannot bind the control socket at {host} port {ports}: {why}; see {called(setting)}")
        self._router = self._connections.router = router
        self._poller.register(router, zmq.POLLIN)
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def start(self, handler: Handler) -> None:
        """Starts the thread; events go to this handler."""
        self._connections.handler = handler
        self._thread.start()

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        """Opens a connection to the owner of this public key; returns its id.

        `on_opened` or `on_closed` follows within the connect timeout.
        """
        conn = f"{self.name}@{self.epoch:x}#{next(self._counter)}"
        self._call(lambda: self._opening.connect(self._context, conn, Life(name, epoch), host, port, key))
        return conn

    def beat(self) -> None:
        """Sends a heartbeat now, because other processes wait for a change that it reports."""
        self._call(self._beat)

    def beat_soon(self) -> None:
        """Sends schedulers a heartbeat at most BEAT_GAP_S from now; requests within that time share one."""
        self._call(self._plan_beat)

    def note_term(self, term: int) -> None:
        """Records the fencing number with which this process, one of several schedulers, greets workers."""
        self._admission.fence.note(term)

    def disconnect(self, conn: str) -> None:
        """Closes a connection without notifying the owner."""
        self._call(lambda: self._connections.drop(conn))

    def send(self, conn: str, body: wire.Body) -> None:
        """Queues a message. A message for a closed connection is dropped; its `on_closed` reports the loss."""
        encoded = wire.encode_body(body)
        self._call(lambda: self._send(conn, encoded))

    def await_confirmed(self, timeout_s: float) -> bool:
        """Waits until the peers of all open connections have confirmed every message sent to them.

        Closing a socket may discard messages that its peer has not read. Returns whether all peers confirmed within the
        timeout.
        """
        with self._connections.changed:
            return self._connections.changed.wait_for(self._is_confirmed, timeout_s)

    def close(self) -> None:
        """Ends the thread and all connections; further calls do nothing."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._auth.stop()
        self._context.destroy(linger=0)
        with self._wake_lock:
            if self._wake_fd >= 0 and not self._thread.is_alive():
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _call(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._is_woken:  # the thread resets this flag before it reads commands, so it will also read the present one
            return
        with self._wake_lock:
            if self._wake_fd >= 0:  # a negative number means that the descriptor is closed
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
                self._is_woken = False  # only after the read, which would swallow a wake-up that comes in between
                self._run_commands()
                self._receive(events)
                if before_s >= next_beat_s:
                    self._check_silence(paused_s=before_s - next_beat_s)
                    self._check_nodes()
                    self._beat()
                    next_beat_s = self._clock() + self._timeouts.heartbeat_interval_s
                elif before_s >= self._soon_s:
                    self._beat(to_workers=False)
            self._run_commands()
        except BaseException as error:
            self._connections.handler.on_fatal(error)
            raise

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _receive(self, events: dict[Any, int]) -> None:
        if self._router in events:
            self._receive_router()
        for connection in self._connections:
            if connection.socket is None:
                continue
            if connection.socket in events:
                self._receive_dealer(connection)
            if connection.monitor in events:
                self._opening.read_events(connection)

    def _receive_router(self) -> None:
        for _ in range(1000):
            try:
                identity, key, frames = receive(self._router)
            except zmq.Again:
                return
            envelope = self._decode(frames)
            if envelope is None:
                continue
            connection = self._connections.arrived(identity)
            if connection is None and isinstance(envelope.body, wire.Hello):
                connection = self._opening.accept(identity, key, envelope, envelope.body)
            if connection is not None:
                if connection.peer_key == key:  # clients choose their own identities
                    self._deliver(connection, envelope)
            elif not isinstance(envelope.body, wire.Hello):
                self._connections.send_gone(identity, envelope)

    def _receive_dealer(self, connection: Connection) -> None:
        for _ in range(1000):
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = self._decode(frames)
            if envelope is not None:
                self._deliver(connection, envelope)
            if connection not in self._connections:
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
        match body := envelope.body:
            case wire.Gone(reason):
                self._connections.lose(connection, reason or wire.GIVEN_UP)
            case wire.Welcome() if not connection.is_open:
                self._opening.welcomed(connection, body)
            case wire.Hello() | wire.Welcome():
                pass
            case _ if connection.is_open:
                if isinstance(body, wire.Heartbeat):
                    connection.num_heard = body.num_heard
                    self._connections.notify_waiting()
                else:
                    connection.num_received += 1
                try:
                    whole = self._merged(connection, body)
                except DeltaLost as error:
                    log.error("closing the connection with %s: %s: %s", connection.peer, type(body).__name__, error)
                    self._connections.send(connection, wire.encode_body(wire.Gone(OUT_OF_ORDER)))
                    self._connections.lose(connection, OUT_OF_ORDER)
                    return
                if whole is not None:
                    self._connections.handler.on_message(connection.id, connection.peer, whole)

    def _merged(self, connection: Connection, body: wire.Body) -> wire.Body | None:
        """Merges a message's deltas into the known state; returns None if an order is refused. Raises DeltaLost."""
        match body:
            case wire.Heartbeat(load=wire.Load() as load):
                return msgspec.structs.replace(body, load=connection.link_receiver.merged(load))
            case wire.Peers(term=term) if connection.kind == "scheduler":
                if not self._admission.fence.admits(term):
                    self._refuse(connection, term)
                    return None
                order = connection.peers_receiver.merged(body)
                self._admission.set_peers(order.peers)
                return order
        return body

    def _refuse(self, connection: Connection, term: int) -> None:
        now = self._admission.fence.term
        log.warning("refusing an order of %s: its term is %d, the owner's is %d", connection.peer, term, now)
        self._connections.send(connection, wire.encode_body(wire.StaleTerm(now)))

    def _send(self, conn: str, encoded: msgspec.Raw) -> None:
        connection = self._connections.get(conn)
        if connection is not None:
            connection.num_sent += 1
            self._connections.send(connection, encoded)

    def _check_silence(self, paused_s: float) -> None:
        """Drops connections that were silent for too long.

        `paused_s`: how long this process itself was stalled. After a short pause, silence proves nothing. After a long
        pause, the peers have dropped this process.
        """
        now_s = self._clock()
        if paused_s > self._timeouts.dead_after_s:
            log.warning("this process was stalled for %.1f s; reopening its connections", paused_s)
            for connection in self._connections:
                self._connections.lose(connection, wire.PAUSED)
            return
        forgive = paused_s > self._timeouts.dead_after_s / 2
        for connection in self._connections:
            limit_s = self._timeouts.dead_after_s if connection.is_open else self._timeouts.connect_timeout_s
            if forgive:
                connection.last_seen_s = now_s
            elif now_s - connection.last_seen_s > limit_s:
                self._connections.lose(connection, f"nothing heard for {now_s - connection.last_seen_s:.1f} s")

    def _check_nodes(self) -> None:
        """Reads the nodes' files again, and closes connections of nodes that are no longer trusted."""
        if not self._nodes.has_files or self._clock() < self._nodes_due_s:
            return
        self._nodes_due_s = self._clock() + READ_AGAIN_S
        self._nodes.read_again()
        for connection in self._connections:
            node, keys = connection.node
            if node and (problem := self._nodes.problem(node, keys)):
                log.error("closing the connection with %s: %s", plain(connection.peer), problem)
                if connection.is_open:
                    self._connections.send(connection, wire.encode_body(wire.Gone(problem[: wire.MOST_TEXT])))
                self._connections.lose(connection, NODE_REFUSED + problem)

    def _plan_beat(self) -> None:
        self._soon_s = min(self._soon_s, self._beaten_s + BEAT_GAP_S)

    def _beat(self, to_workers: bool = True) -> None:
        load = figures = self._connections.handler.load()
        if load is not None and load.links:  # workers do not need the links
            figures = msgspec.structs.replace(load, links={})
        self._beaten_s, self._soon_s = self._clock(), math.inf
        for connection in self._connections:
            if connection.is_open and (to_workers or connection.kind == "scheduler"):
                told = figures
                if load is not None and figures is not None and connection.kind == "scheduler":
                    told = connection.link_sender.with_changes(figures, load.links)
                heartbeat = wire.Heartbeat(load=told, num_heard=connection.num_received)
                self._connections.send(connection, wire.encode_body(heartbeat))

    def _is_confirmed(self) -> bool:
        waiting = [each for each in self._connections if each.is_open and each.num_heard < each.num_sent]
        return not waiting and not self._commands
