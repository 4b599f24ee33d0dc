"""In-memory mail between instances and the scheduler, which has one core. Every message takes time.

Connections open, close and are lost as in net/mailbox.py. Knows nothing of messages' contents.
"""

from __future__ import annotations

import itertools
from typing import Literal, Protocol

from pd_cluster import wire
from pd_cluster.costs.linear_costs import HostCost
from pd_cluster.net.payload_channel import PayloadSender
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.simulate.event_agenda import Agenda

LOST = "the connection was closed"


class SimulatedPeer(Protocol):
    """One life of a process, with the methods of a mailbox's handler. `peer`: its name@epoch."""

    @property
    def peer(self) -> str: ...
    @property
    def kind(self) -> Literal["scheduler", "worker"]: ...

    def on_opened(self, conn: str, peer: str, kind: str) -> None: ...
    def on_message(self, conn: str, peer: str, body: wire.Body) -> None: ...
    def on_closed(self, conn: str, peer: str, reason: str) -> None: ...


class SimulatedMailboxes:
    """All mailboxes. Processes are identified by `peer`, so that a SimulatedPost can be created before its process."""

    def __init__(self, agenda: Agenda, costs: HostCost) -> None:
        self._agenda, self._costs = agenda, costs
        self._peers: dict[str, SimulatedPeer] = {}  # live processes
        self._ends: dict[str, tuple[str, str]] = {}  # connection -> the process that opened it, and the other end
        self._conns: dict[str, dict[str, None]] = {}  # process -> connections, in order of opening
        self._number = itertools.count()
        self._free_s = 0.0  # when the scheduler will have handled all messages so far

    def add(self, peer_process: SimulatedPeer) -> None:
        self._peers[peer_process.peer] = peer_process
        self._conns[peer_process.peer] = {}

    def remove(self, peer: str, reason: str = LOST) -> None:
        """Ends a life and closes all its connections."""
        for conn in list(self._conns[peer]):
            self.disconnect(peer, conn, reason)
        del self._peers[peer], self._conns[peer]

    def connect(self, peer: str, other: str) -> str:
        """Opens a connection. Returns its name, the same at both ends, which are notified after a message time."""
        conn = f"{other}#{next(self._number)}"
        if other not in self._peers:
            self._agenda.after(self._costs.message_s, self._peers[peer].on_closed, conn, other, LOST)
            return conn
        self._ends[conn] = peer, other
        self._conns[peer][conn] = self._conns[other][conn] = None
        self._agenda.after(self._costs.message_s, self._open, conn)
        return conn

    def _open(self, conn: str) -> None:
        if (ends := self._ends.get(conn)) is not None:
            for peer, other in (ends[::-1], ends):
                self._peers[peer].on_opened(conn, other, self._peers[other].kind)

    def disconnect(self, peer: str, conn: str, reason: str = LOST) -> None:
        """Ends a connection. The other end learns of that after it has received earlier messages."""
        if (ends := self._ends.pop(conn, None)) is not None:
            other = ends[1] if ends[0] == peer else ends[0]
            del self._conns[peer][conn]
            self._agenda.at(self._arrives_s(other), self._lose, other, conn, peer, reason)

    def _lose(self, peer: str, conn: str, other: str, reason: str) -> None:
        if self._conns.get(peer, {}).pop(conn, 0) is None:
            self._peers[peer].on_closed(conn, other, reason)

    def send(self, peer: str, conn: str, body: wire.Body) -> None:
        """Delivers a message unless its connection is gone."""
        if (ends := self._ends.get(conn)) is not None:
            other = ends[1] if ends[0] == peer else ends[0]
            self._agenda.at(self._arrives_s(other), self._deliver, other, conn, peer, body)

    def _deliver(self, peer: str, conn: str, other: str, body: wire.Body) -> None:
        if conn in self._conns.get(peer, ()):
            self._peers[peer].on_message(conn, other, body)

    def _arrives_s(self, peer: str) -> float:
        seconds = self._costs.message_s
        return self.handled_s(seconds) if self._peers[peer].kind == "scheduler" else self._agenda.now() + seconds

    def handled_s(self, seconds: float) -> float:
        """Occupies the scheduler for this many seconds. Returns when that time ends."""
        self._free_s = max(self._agenda.now(), self._free_s) + seconds
        return self._free_s


class SimulatedPost:
    """Connects and sends as one process. Satisfies membership.WorkersMailbox."""

    table = public_key = b""

    def __init__(self, mail: SimulatedMailboxes, peer: str) -> None:
        self._mail, self._peer = mail, peer

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        return self._mail.connect(self._peer, peer_key(name, epoch))

    def disconnect(self, conn: str) -> None:
        self._mail.disconnect(self._peer, conn)

    def payload_sender(self) -> PayloadSender:
        raise AssertionError("simulated instances keep their weights")

    def send(self, conn: str, body: wire.Body) -> None:
        self._mail.send(self._peer, conn, body)
