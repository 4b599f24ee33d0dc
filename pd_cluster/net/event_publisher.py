"""Publishes batches of KV events as vLLM does: a PUB with sequence numbers, and a ROUTER that replays past batches.

Frames: topic, sequence (8 bytes, big-endian), batch in msgpack. A separate thread owns the sockets, so `publish` never
blocks. Counts batches that cannot be queued and subscribers that fall behind; in both cases subscribers see gaps in the
sequence numbers. Endpoints that other hosts can reach are CURVE sockets, open to owners of keys in the list of trusted
nodes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pd_cluster.errors import ConfigError, called
from pd_cluster.net.event_replays import SEQUENCE_NBYTES, EventReplays, frames_of
from pd_cluster.net.node_trust import READ_AGAIN_S, node_trust
from pd_cluster.net.zmq_sockets import HANDSHAKE_TIMEOUT_S, KeyPair, decode_key
from pd_cluster.settings.kv_events_config import KVEventsConfig, check_private, is_private
from pd_cluster.settings.process_configs import Credentials

log = logging.getLogger(__name__)

MAX_REQUEST_NBYTES = 64
BIND_RETRY_S, BIND_TIMEOUT_S = (
    0.02,
    5.0,
)  # the retry period while a port is still in use, and the time after which this is an error
LOG_AGAIN_S = 60.0  # the time between log lines about the same problem


class EventPublisher:
    """Raises ConfigError for an endpoint that is in use, or that strangers could read."""

    def __init__(self, config: KVEventsConfig, credentials: Credentials) -> None:
        self._config = config
        has_curve = bool(credentials.node_key_file and credentials.trusted_nodes)
        check_private(config, has_curve)
        self._nodes = node_trust(credentials)
        self._keys = KeyPair.of(self._nodes.private_key) if has_curve else None
        self.context = zmq.Context()
        self._auth: ThreadAuthenticator | None = None
        if self._keys is not None:
            self._auth = ThreadAuthenticator(self.context)
            self._auth.start()
            self._auth.configure_curve_callback(domain="*", credentials_provider=self)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: deque[tuple[int, msgspec.Struct]] = deque()
        self._topic = config.topic.encode()
        self._past: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)  # (sequence number, batch)
        self.replays = EventReplays(self._topic, self._past)
        self._next = self._num_queued = 0
        # Numbers of batches not queued, of batches not sent, and of times a subscriber fell behind.
        self._num_lost = self._num_failed = self._num_slow = 0
        self._logged_s = -LOG_AGAIN_S
        self._stopping = self._is_broken = False
        self.publisher: Any = None
        self._replay: Any = None
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        try:
            self._open()
        except BaseException:
            self._end()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # ---- any thread

    @property
    def num_published(self) -> int:
        """Returns the number of batches that were queued."""
        return self._num_queued

    @property
    def num_dropped(self) -> int:
        """Counts batches that were not queued or not sent, plus the number of times a subscriber's queue was full.

        A subscriber with a full queue misses batches until it reads again.
        """
        return self._num_lost + self._num_failed + self._num_slow

    def callback(self, domain: str, key: bytes) -> bool:
        """Answers ZAP's question about a subscriber's public key."""
        return self._nodes.trusts_key(decode_key(key))

    def publish(self, batch: msgspec.Struct) -> None:
        """Queues a batch, which the caller must not change afterwards. Called by one thread."""
        sequence, self._next = self._next, self._next + 1
        if len(self._queue) >= self._config.max_queue_size:
            self._num_lost += 1
            return
        self._queue.append((sequence, batch))
        self._num_queued += 1
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Publishes queued batches and ends; further calls do nothing. `publish` must not follow."""
        if self._wake_fd < 0:
            return
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)
        self._end()

    # ---- the thread

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while not self._stopping or (self._queue and self.publisher is not None):
            try:
                self._turn(encoder)
            except Exception as error:  # the thread's outermost loop: an exception here would stop all events
                if time.monotonic() > self._logged_s + LOG_AGAIN_S:
                    self._logged_s = time.monotonic()
                    log.exception("KV events: an error occurred; publishing continues")
                self._is_broken = self._is_broken or isinstance(error, zmq.ZMQError)
                time.sleep(BIND_RETRY_S)

    def _turn(self, encoder: msgspec.msgpack.Encoder) -> None:
        if self._is_broken:
            self._reopen()
        ready = dict(self._poller.poll(int((BIND_RETRY_S if self.replays.under_way else READ_AGAIN_S) * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        while self._queue and self.publisher is not None:
            number, batch = self._queue.popleft()
            try:
                self.send(number, encoder.encode(batch))
            except Exception:
                self._num_failed += 1
                raise
        if self.publisher in ready:
            self._read_subscriptions()
        if self._replay is not None:
            if self._replay in ready:
                self._read_request()
            self.replays.send(self._replay)
        if self._auth is not None and self._nodes.read_again():
            log.info("reopening the connections for KV events, because the list of nodes has changed")
            self._reopen()

    def send(self, number: int, payload: bytes) -> None:
        self._past.append((number, payload))
        frames = frames_of(self._topic, number, payload)
        if self._is_sent(frames):
            return
        self.publisher.getsockopt(zmq.EVENTS)  # libzmq then counts sent messages now, not up to a millisecond later
        if self._is_sent(frames):
            return
        self._num_slow += 1
        self.publisher.setsockopt(zmq.XPUB_NODROP, 0)
        self.publisher.send_multipart(frames, zmq.NOBLOCK)
        self.publisher.setsockopt(zmq.XPUB_NODROP, 1)

    def _is_sent(self, frames: list[bytes]) -> bool:
        """Sends to all subscribers and returns True; or to none, and returns False, if a subscriber's queue is full."""
        try:
            self.publisher.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read_subscriptions(self) -> None:
        """Drains subscription messages from the XPUB; libzmq has already acted on them."""
        try:
            while True:
                self.publisher.recv(zmq.NOBLOCK)
        except zmq.Again:
            pass

    def _read_request(self) -> None:
        """Reads a request for the batches from a sequence number on."""
        try:
            client, *frames = self._replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_NBYTES:
            log.warning("a request for past KV events is not a number of %d bytes: ignored", SEQUENCE_NBYTES)
        else:
            self.replays.begin(self._replay, client, int.from_bytes(frames[1], "big"))

    def _open(self) -> None:
        config = self._config
        self.publisher = self._bound(zmq.XPUB, config.endpoint, config.hwm)
        self.publisher.setsockopt(zmq.XPUB_NODROP, 1)
        if config.replay_endpoint is not None:
            self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, config.hwm)
            # a full queue raises an error instead of losing the message
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _bound(self, kind: int, endpoint: str, hwm: int) -> Any:
        socket = None
        try:
            socket = self.context.socket(kind)
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.SNDHWM, hwm),
                (zmq.MAXMSGSIZE, MAX_REQUEST_NBYTES + 1024),
                (zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000)),
                (zmq.IPV6, int("[" in endpoint)),
            ):
                socket.setsockopt(option, value)
            if not is_private(endpoint) and self._keys is not None:
                socket.curve_server = True
                self._keys.put_on(socket)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close(linger=0)
            raise ConfigError(
                f"{called('kv_events_config')}: cannot bind {endpoint}: {error}; give another endpoint"
            ) from None
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _reopen(self) -> None:
        """Closes all connections; subscribers reconnect automatically if their keys are still trusted."""
        self._close_sockets()
        told_s = time.monotonic() + BIND_TIMEOUT_S
        while not self._stopping:
            try:
                self._open()
                self._is_broken = False
                return
            except ConfigError as error:  # libzmq's own thread releases the port a moment later
                self._close_sockets()
                if time.monotonic() > told_s:
                    log.error("KV events are not published until this succeeds: %s", error)
                    told_s = time.monotonic() + 60
                time.sleep(BIND_RETRY_S)

    def _close_sockets(self) -> None:
        for socket in (self.publisher, self._replay):
            if socket is not None:
                self._poller.unregister(socket)
                socket.close(linger=0)
        self.publisher = self._replay = None
        self.replays.under_way.clear()

    def _end(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        self.context.destroy(linger=0)
        os.close(self._wake_fd)
        self._wake_fd = -1


def public_text(key: bytes) -> str:
    """Returns a public key in Z85, the form that subscribers' libraries expect."""
    return z85.encode(key).decode()
