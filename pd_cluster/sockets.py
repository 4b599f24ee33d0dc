"""ZeroMQ sockets as this project wants them: CURVE keys from the cluster's secret, bounded queues, no lingering."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from pd_cluster import wire

HIGH_WATER_MARK = 20_000  # messages queued for a peer that does not read; one more and the connection is cut


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One key pair for the whole cluster, derived from its secret: to know it is to be a member."""

    public: bytes
    secret: bytes

    @classmethod
    def from_secret(cls, secret: bytes) -> CurveKeys:
        private = z85.encode(hmac.new(b"pd-cluster curve 1", secret, hashlib.sha256).digest())
        return cls(public=zmq.curve_public(private), secret=private)


@dataclass(slots=True)
class Connection:
    """One peer over one socket. `id` is unique in this process; a closed connection never opens again."""

    id: str
    peer: str  # name@epoch
    epoch: int
    last_seen_s: float
    identity: bytes = b""  # set for connections that came in through the ROUTER
    kind: str = ""
    socket: Any = None  # the DEALER of connections that we opened
    monitor: Any = None
    is_open: bool = False
    pending: list[bytes] = field(default_factory=list)


def open_router(context: Any, keys: CurveKeys, host: str) -> Any:
    """A ROUTER that only members of the cluster can connect to; not bound yet."""
    router = context.socket(zmq.ROUTER)
    _set_options(router)
    router.curve_server = True
    router.curve_secretkey, router.curve_publickey = keys.secret, keys.public
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.IPV6, int(":" in host))
    return router


def open_dealer(context: Any, keys: CurveKeys, identity: bytes, host: str, connect_timeout_s: float) -> tuple[Any, Any]:
    """A DEALER, not connected yet, and the socket that tells when it opens and closes. It never connects twice."""
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(connect_timeout_s * 1000))
    socket.curve_serverkey = keys.public
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
    return socket, monitor


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _set_options(socket: Any) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, HIGH_WATER_MARK),
        (zmq.RCVHWM, HIGH_WATER_MARK),
        (zmq.SNDTIMEO, 0),
        (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_NBYTES),
        (zmq.HANDSHAKE_IVL, 5000),
    ):
        socket.setsockopt(option, value)
