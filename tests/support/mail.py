"""A mailbox without sockets that records messages, and real mailboxes that put their events into a queue."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from typing import Any, Literal

from pd_cluster import wire
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.map_deltas import PeersReceiver
from pd_cluster.net.payload_channel import PayloadSender
from pd_cluster.net.peer_admission import Life
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LinkState

SECRET = b"s" * 32
SCHEDULER = KeyPair.of(b"private key of the scheduler 32b")
WAIT_S = 60.0


class RecordedMail:
    """A mailbox that only records messages; `Peers` are recorded as their receivers understand them.

    The connection to NAME is called `to-NAME`, or `to-NAME#1` and so on if `is_numbered`.
    """

    table = public_key = b""

    def __init__(self, is_numbered: bool = False) -> None:
        self._is_numbered = is_numbered
        self.sent: list[tuple[str, wire.Body]] = []
        self.opened: list[tuple[str, int, str, int, bytes]] = []  # name, epoch, host, port, key
        self.closed: list[str] = []
        self.num_beats = self.num_beats_at_once = 0
        self._peers: defaultdict[str, PeersReceiver] = defaultdict(PeersReceiver)

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        self.opened.append((name, epoch, host, port, key))
        return f"to-{name}#{len(self.opened)}" if self._is_numbered else f"to-{name}"

    def disconnect(self, conn: str) -> None:
        self.closed.append(conn)

    def payload_sender(self) -> PayloadSender:
        raise AssertionError("nothing is sent over a channel here")

    def send(self, conn: str, body: wire.Body) -> None:
        wire.encode_body(body)
        self.sent.append((conn, self._peers[conn].merged(body) if isinstance(body, wire.Peers) else body))

    def beat(self) -> None:
        self.num_beats_at_once += 1

    def beat_soon(self) -> None:
        self.num_beats += 1

    def of(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(conn, body) for conn, body in self.sent if isinstance(body, kind)]

    def take(self, kind: type[Any]) -> list[Any]:
        """Removes and returns the recorded bodies of this kind."""
        found = self.of(kind)
        self.sent = [each for each in self.sent if each not in found]
        return [body for _, body in found]


class Box:
    """A real mailbox with a queue for its events and another for the heartbeats that it receives."""

    def __init__(
        self,
        name: str,
        epoch: int,
        kind: Literal["scheduler", "worker"],
        credentials: Credentials,
        times: Timeouts,
        listens: bool = False,
    ) -> None:
        self.ahead_s = 0.0  # how far its clock is ahead
        self.links: dict[str, LinkState] = {}  # link states that its load reports
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.beats: queue.SimpleQueue[wire.Heartbeat] = queue.SimpleQueue()
        self.mailbox = Mailbox(Life(name, epoch), kind, credentials, times, lambda: time.monotonic() + self.ahead_s)
        self.port = self.mailbox.bind("127.0.0.1", PortRange()) if listens else 0
        self.mailbox.start(self)

    def connect_to(self, other: Box, epoch: int | None = None) -> str:
        there = other.mailbox
        return self.mailbox.connect(there.name, epoch or there.epoch, "127.0.0.1", other.port, there.public_key)

    @property
    def info(self) -> wire.PeerInfo:
        return wire.PeerInfo(
            name=self.mailbox.name,
            epoch=self.mailbox.epoch,
            role="prefill",
            host="127.0.0.1",
            control_port=self.port,
            public_key=self.mailbox.public_key,
        )

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self.events.put(("opened", conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Heartbeat):
            self.beats.put(body)
        else:
            self.events.put(("message", conn, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self.events.put(("closed", conn, reason))

    def on_fatal(self, error: BaseException) -> None:
        self.events.put(("fatal", error))

    def load(self) -> wire.Load | None:
        return wire.Load(num_blocks=5, links=self.links)

    def wait(self, kind: str) -> tuple[Any, ...]:
        """Returns the next event of this kind, and drops all earlier ones."""
        while True:
            event = self.events.get(timeout=WAIT_S)
            assert event[0] != "fatal", event
            if event[0] == kind:
                return event

    def next(self, kind: str) -> tuple[Any, ...]:
        """Returns the next event, which must be of this kind."""
        event = self.events.get(timeout=WAIT_S)
        assert event[0] == kind, event
        return event
