"""Opens connections: greets the peer at the connecting end, and admits it at the listening end.

The tables are in docs/protocol/pairs.md, "Opening a connection"; peer_admission.py decides. Knows nothing of the
messages that follow the greetings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import zmq

from pd_cluster import wire
from pd_cluster.errors import ConfigError
from pd_cluster.host import open_files
from pd_cluster.net import zmq_sockets
from pd_cluster.net.mailbox_connections import CLOSED, Connections
from pd_cluster.net.node_trust import NODE_REFUSED, NodeTrust, ProvenNode, plain
from pd_cluster.net.peer_admission import Admission, Life, peer_key
from pd_cluster.net.zmq_sockets import Connection, KeyPair, next_event, open_dealer
from ranktable_tools.host_addresses import bracketed

log = logging.getLogger(__name__)

NOT_OPENED = "the connection did not open: no process listens at this address"
CUT_SHORT = "the other end closed the connection during the handshake: it has another key, or is another program"
NO_HANDSHAKE = "the other end sent nothing during the handshake: it is stalled, or is another program"
NOT_ADMITTED = "the other end does not admit this process's key"
OTHER_SECRET = "the other end has another secret"
# between a scheduler and a worker these refusals last as long as both processes live
REFUSALS = (NOT_ADMITTED, OTHER_SECRET)
PERIOD_S, MOST_LINES = 10.0, 20  # the most log lines per period about refused peers: peers may connect at any rate


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """The identity under which this process greets others, and the peers that it admits."""

    kind: Literal["scheduler", "worker"]
    keys: KeyPair
    admission: Admission
    nodes: NodeTrust


class Handshake:
    """`table` returns the digest of the global rank table; the scheduler's digest changes while it runs."""

    def __init__(
        self,
        connections: Connections,
        own: LocalIdentity,
        table: Callable[[], bytes],
        connect_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._connections = connections
        self._kind, self._keys, self._admission, self._nodes = own.kind, own.keys, own.admission, own.nodes
        self._table = table
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._since_s, self._num_refused = clock(), 0  # when the current period began, and its refusals

    def accept(self, identity: bytes, key: bytes, envelope: wire.Envelope, hello: wire.Hello) -> Connection | None:
        """Answers a Hello that arrived at the ROUTER; returns None if the peer is not admitted, or has already gone."""
        peer = peer_key(envelope.from_name, envelope.from_epoch)
        if hello.version != wire.PROTOCOL_VERSION:
            own = wire.PROTOCOL_VERSION
            self._note("%s speaks protocol %d, this process speaks %d: not accepted", plain(peer), hello.version, own)
            return None
        if not self._admission.admits(key, peer, hello.kind):
            self._note(
                "%s claims to be a %s, but its key belongs to another process: not accepted", plain(peer), hello.kind
            )
            return None
        node = ProvenNode()
        if hello.kind == "scheduler":
            self._admission.fence.note(hello.term)
        else:
            try:
                node = self._nodes.believe(hello.node, hello.node_proofs, peer, key, "client")
            except ConfigError as error:
                self._note("not accepted: %s", error)
                self._connections.send_gone(identity, envelope, str(error))
                return None
        conn, epoch = f"in:{identity.decode(errors='replace')}", envelope.from_epoch
        connection = Connection(
            conn, peer, epoch, self._clock(), identity, key, kind=hello.kind, node=node, is_open=True
        )
        self._connections.add(connection)
        proof, proofs = self._admission.proof_to(peer, key), self._nodes.proofs_to(peer, key, "server")
        welcome = wire.Welcome(proof, self._table(), *proofs)
        self._connections.send(connection, wire.encode_body(welcome))
        if connection not in self._connections:
            return None
        self._connections.handler.on_opened(conn, peer, hello.kind)
        return connection

    def _note(self, refusal: str, *of: object) -> None:
        """Logs why a peer was not accepted: at most MOST_LINES in a period, then the number of further refusals."""
        if (now_s := self._clock()) - self._since_s > PERIOD_S:
            if (num_untold := self._num_refused - MOST_LINES) > 0:
                log.error("%d more peers were not accepted", num_untold)
            self._since_s, self._num_refused = now_s, 0
        self._num_refused += 1
        if self._num_refused <= MOST_LINES:
            log.error(refusal, *of)

    def connect(self, context: Any, conn: str, life: Life, host: str, port: int, key: bytes) -> None:
        peer = peer_key(*life)
        try:
            socket, monitor = open_dealer(context, self._keys, key, conn.encode(), host, self._connect_timeout_s)
        except zmq.ZMQError as error:
            soft, hard = open_files()
            self._note("no connection to %s: %s (limit %d; ulimit -n raises it to %d)", plain(peer), error, soft, hard)
            self._connections.handler.on_closed(conn, peer, f"cannot connect to {host}:{port}: {error}")
            return
        connection = Connection(
            conn, peer, life.epoch, self._clock(), peer_key=key, host=host, socket=socket, monitor=monitor
        )
        self._connections.add(connection)
        try:
            socket.connect(f"tcp://{bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self._connections.lose(connection, f"cannot connect to {host}:{port}: {error}")

    def read_events(self, connection: Connection) -> None:
        """Reads what the monitor of a connection's DEALER reports."""
        if connection.is_open:
            self._connections.check_closed(connection)
            return
        while connection in self._connections and (event := next_event(connection.monitor)) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet(connection)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._connections.lose(connection, NOT_ADMITTED)
            else:
                self._connections.lose(connection, self._why_not_opened(connection, event))

    def _why_not_opened(self, connection: Connection, event: int) -> str:
        if event != zmq.EVENT_DISCONNECTED:
            return NOT_OPENED
        waited_s = self._clock() - connection.last_seen_s  # since the handshake began
        return NO_HANDSHAKE if waited_s >= zmq_sockets.HANDSHAKE_TIMEOUT_S else CUT_SHORT

    def _greet(self, connection: Connection) -> None:
        node, proofs = self._nodes.proofs_to(connection.peer, connection.peer_key, "client")
        greeting = wire.Hello(kind=self._kind, term=self._admission.fence.term, node=node, node_proofs=proofs)
        hello = self._connections.seal(connection, wire.encode_body(greeting))
        try:
            connection.socket.send(hello, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._connections.lose(connection, f"{CLOSED}: {error}")

    def welcomed(self, connection: Connection, welcome: wire.Welcome) -> None:
        """Opens a connection whose listening end has answered, if the answer proves that it has the secret and the
        node's key.
        """
        if not self._admission.is_proof(welcome.proof, connection.peer, connection.peer_key):
            self._connections.lose(connection, OTHER_SECRET)
            return
        if self._admission.is_worker(connection.peer_key):
            peer, key = connection.peer, connection.peer_key
            try:
                connection.node = self._nodes.believe(
                    welcome.node, welcome.node_proofs, peer, key, "server", connection.host
                )
            except ConfigError as error:
                self._connections.lose(connection, f"{NODE_REFUSED}{error}")
                return
        table = welcome.table
        if self._kind == "scheduler" and (own := self._table()) and table and table != own:
            log.warning("%s was started with another global rank table than the scheduler's", connection.peer)
        connection.is_open = True
        connection.last_seen_s = self._clock()
        pending, connection.pending = connection.pending, []
        for frame in pending:
            self._connections.send_frame(connection, frame)
        self._connections.handler.on_opened(connection.id, connection.peer, connection.kind)
