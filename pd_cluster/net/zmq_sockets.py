"""Opens ZeroMQ sockets as this project configures them: CURVE with a key pair per process, bounded queues, no
lingering.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pd_cluster import wire
from pd_cluster.net.map_deltas import LinkReceiver, LinkSender, PeersReceiver
from pd_cluster.net.node_trust import ProvenNode

HIGH_WATER_MARK = 20_000  # messages queued for a peer that does not read; one more closes the connection
HANDSHAKE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process's key pair: 32 bytes each, as in Curve25519."""

    public: bytes
    private: bytes = field(repr=False)

    @classmethod
    def of(cls, private: bytes) -> KeyPair:
        """Returns the pair of this private key, or a new pair if the key is empty."""
        private = private or secrets.token_bytes(wire.KEY_NBYTES)
        return cls(z85.decode(zmq.curve_public(z85.encode(private))), private)

    def put_on(self, socket: Any) -> None:
        socket.curve_secretkey, socket.curve_publickey = z85.encode(self.private), z85.encode(self.public)


@dataclass(slots=True)
class Connection:
    """A peer's connection over one socket. `id` is unique in this process; a closed connection never opens again."""

    id: str
    peer: str  # name@epoch
    epoch: int
    last_seen_s: float
    identity: bytes = b""  # set for connections that arrived at the ROUTER
    peer_key: bytes = b""  # the other end's public key
    kind: str = ""
    host: str = ""  # of connections that this process opened
    node: ProvenNode = field(default_factory=ProvenNode)
    socket: Any = None  # the DEALER of connections that this process opened
    monitor: Any = None
    is_open: bool = False
    pending: list[bytes] = field(default_factory=list)
    # Counts of messages apart from greetings and heartbeats: sent, received, and confirmed by the peer.
    num_sent: int = 0
    num_received: int = 0
    num_heard: int = 0
    link_sender: LinkSender = field(default_factory=LinkSender)
    link_receiver: LinkReceiver = field(default_factory=LinkReceiver)
    peers_receiver: PeersReceiver = field(default_factory=PeersReceiver)


def new_context() -> zmq.Context[Any]:
    """Returns a context with ZeroMQ's maximum number of sockets; the default is 1,023, and a peer takes three."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def open_router(context: Any, keys: KeyPair, host: str) -> Any:
    """Opens a ROUTER, not bound yet, for clients whose key ZAP admits."""
    router = context.socket(zmq.ROUTER)
    _set_options(router)
    router.curve_server = True
    keys.put_on(router)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.IPV6, int(":" in host))
    return router


def open_dealer(
    context: Any, keys: KeyPair, server_key: bytes, identity: bytes, host: str, connect_timeout_s: float
) -> tuple[Any, Any]:
    """Opens a DEALER, not connected yet, and the socket that monitors it. The DEALER never reconnects.

    Raises zmq.ZMQError if the process has no free descriptor.
    """
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(connect_timeout_s * 1000))
    socket.curve_serverkey = z85.encode(server_key)
    keys.put_on(socket)
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    try:
        return socket, socket.get_monitor_socket(events | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise


def decode_key(text: bytes | str) -> bytes:
    """Decodes a public key in ZAP's format."""
    return bytes(z85.decode(text))


def receive(router: Any) -> tuple[bytes, bytes, list[bytes]]:
    """Returns the identity, the public key that ZAP admitted for this frame's connection, and the other frames. Raises
    zmq.Again.
    """
    identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
    return identity.bytes, decode_key(identity.get("User-Id")), [frame.bytes for frame in frames]


def next_event(monitor: Any) -> int | None:
    """Returns a monitor's next queued event, or None."""
    try:
        return int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
    except zmq.Again:
        return None


def _set_options(socket: Any) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, HIGH_WATER_MARK),
        (zmq.RCVHWM, HIGH_WATER_MARK),
        (zmq.SNDTIMEO, 0),
        (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_NBYTES),
        (zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000)),
    ):
        socket.setsockopt(option, value)
