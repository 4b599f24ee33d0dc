"""Sends payloads in one direction between two processes over ZeroMQ, encrypted and authenticated at both ends by CURVE.

Each end creates a key pair for this channel only, and learns the other's public key over a connection that is already
authenticated; no other client is admitted. Knows nothing of tensors or of what payloads mean. The table is in
docs/protocol/pairs.md, "The encrypted pair".
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pd_cluster.net.zmq_sockets import HANDSHAKE_TIMEOUT_S, KeyPair, decode_key, next_event
from ranktable_tools.host_addresses import bracketed

MAX_PAYLOAD_NBYTES = 1 << 30
NUM_UNREAD = 4  # payloads that the receiver queues; further ones wait at the sender
TAG_NBYTES = 8
DOMAIN = "payloads"  # the ZAP domain: a socket with a domain admits no client when no authenticator answers
POLL_S = 0.05  # the time between checks of the connection while a payload is being sent


class PayloadError(RuntimeError):
    """The channel is unusable."""


class PayloadReceiver:
    """The listening end, which accepts the owner of `peer_key` once. Used by one thread."""

    def __init__(self, host: str, peer_key: bytes) -> None:
        """Listens at this numeric address, on a port that the system chooses. Raises PayloadError."""
        keys = KeyPair.of(b"")
        self.public_key = keys.public
        self._peer_key = peer_key
        self._context: Any = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._socket = self._context.socket(zmq.PULL)
        _set_options(self._socket, host)
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        keys.put_on(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.bind(f"tcp://{bracketed(host)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise PayloadError(f"cannot listen at {host}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def callback(self, domain: str, key: bytes) -> bool:
        """Answers ZAP's question about a client's public key; runs on the authenticator's thread."""
        return decode_key(key) == self._peer_key

    def accept(self, timeout_s: float) -> None:
        """Waits until the other end has connected; no other client is admitted afterwards. Raises PayloadError."""
        if not self._monitor.poll(int(1000 * timeout_s)):
            raise PayloadError(f"the other end did not connect within {timeout_s:g} s")
        # Without an authenticator, ZAP_ENFORCE_DOMAIN refuses all clients. An unbind would also close the connection.
        self._authenticator.stop()
        self._socket.disable_monitor()

    def receive(self, nbytes: int, tag: int, timeout_s: float) -> memoryview:
        """Returns the next payload, which must have this tag and size. Raises PayloadError."""
        if not self._socket.poll(int(1000 * timeout_s)):
            raise PayloadError(f"nothing arrived within {timeout_s:g} s")
        frames = self._socket.recv_multipart(copy=False)
        if len(frames) != 2 or frames[0].bytes != tag.to_bytes(TAG_NBYTES, "big"):
            raise PayloadError("a payload arrived that is not the announced one")
        if len(frames[1]) != nbytes:
            raise PayloadError(f"{len(frames[1])} bytes arrived, {nbytes} were announced")
        return memoryview(frames[1].buffer)

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        if self._authenticator.is_alive():
            self._authenticator.stop()
        self._context.destroy(linger=0)


class PayloadSender:
    """The connecting end, used once and by one thread."""

    def __init__(self, keys: KeyPair) -> None:
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._monitor: Any = None
        self.keys = keys

    def connect(self, host: str, port: int, server_key: bytes, timeout_s: float) -> None:
        """Waits until the other end has proved this key and admitted this process's key. Raises PayloadError."""
        socket = self._socket
        _set_options(socket, host)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * timeout_s))
        socket.curve_serverkey = z85.encode(server_key)
        self.keys.put_on(socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = socket.get_monitor_socket(events | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        try:
            socket.connect(f"tcp://{bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            raise PayloadError(f"cannot connect to {host}:{port}: {error}") from error
        if not self._monitor.poll(int(1000 * timeout_s)):
            raise PayloadError(f"the other end did not answer within {timeout_s:g} s")
        if next_event(self._monitor) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise PayloadError("the other end refused the connection")

    def send(self, payload: memoryview, tag: int) -> PayloadUnderWay:
        """Sends a payload, which must not change until it has been sent. Raises PayloadError."""
        self.check()
        try:
            parts: list[Any] = [tag.to_bytes(TAG_NBYTES, "big"), payload]
            return PayloadUnderWay(self, self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True))
        except zmq.ZMQError as error:
            raise PayloadError(f"the connection was closed: {error}") from error

    def check(self) -> None:
        """Raises PayloadError if the connection is closed."""
        if self._monitor is None or next_event(self._monitor) is not None:
            raise PayloadError("the connection was closed")

    def close(self) -> None:
        if self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
        self._context.destroy(linger=0)


class PayloadUnderWay:
    def __init__(self, sender: PayloadSender, tracker: Any) -> None:
        self._sender = sender
        self._tracker = tracker

    def wait(self, timeout_s: float) -> None:
        """Waits until the payload's memory may be used again. Raises PayloadError."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                self._tracker.wait(max(0.0, min(POLL_S, left_s)))
            except zmq.NotDone:
                self._sender.check()
                if left_s <= 0:
                    raise PayloadError(f"nothing was sent within {timeout_s:g} s") from None
            else:
                self._sender.check()  # a lost connection drops messages that it was sending
                return


def _set_options(socket: Any, host: str) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, int(":" in host)),
        (zmq.SNDHWM, 0),  # the sender waits for earlier payloads itself
        (zmq.RCVHWM, NUM_UNREAD),
        (zmq.MAXMSGSIZE, MAX_PAYLOAD_NBYTES),
        (zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_TIMEOUT_S)),
    ):
        socket.setsockopt(option, value)
