"""What both ends of a link share: the mailbox as they see it, this side's pool, and when a peer last got on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pd_cluster import wire
from pd_cluster.kv.layout import KVLayout
from pd_cluster.transport.events import Report
from pd_cluster.transport.guard import LinkKey
from pd_cluster.transport.receiving import ReceiveThread
from pd_cluster.transport.sending import SendThread
from pd_cluster.types import Note


class Post(Protocol):
    """The mailbox, as far as links need it."""

    def connect(self, name: str, epoch: int, host: str, port: int) -> str: ...
    def disconnect(self, conn: str) -> None: ...
    def send(self, conn: str, body: wire.Body) -> None: ...
    def beat(self) -> None: ...


class LinkThreads(Protocol):
    """What starts the thread of a link's end; transport/factory.py."""

    def send_thread(
        self, conn: str, key: LinkKey, post: Callable[[wire.Body], None], report: Report, note: Note
    ) -> SendThread:
        """Raises LinkError."""

    def receive_thread(
        self,
        conn: str,
        peer: str,
        opened: wire.LinkOpen,
        key: LinkKey,
        post: Callable[[wire.Body], None],
        report: Report,
        note: Note,
    ) -> ReceiveThread:
        """Raises LinkError."""


@dataclass(frozen=True, slots=True)
class Side:
    """What a link must know of this process: who it is, and its pool."""

    own: str  # name@epoch
    secret: bytes
    model_identity: str
    layout: KVLayout
    num_blocks: int
    probe_seed: int
    options: wire.KVOptions

    def key(self, link_id: str, sender: str, receiver: str) -> LinkKey:
        return LinkKey.derive(self.secret, link_id, sender, receiver, self.options.hmac)


class Progress:
    """When each connection's peer was last seen to get on with its work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}
        self._moved: dict[str, tuple[int, float]] = {}

    def heard(self, conn: str, load: wire.Load) -> None:
        if self._seen.get(conn, (-1, 0.0))[0] != load.progress:
            self._seen[conn] = (load.progress, self._clock())

    def moved(self, conn: str, nbytes: int) -> None:
        """So much of it has come over the connection itself: what a peer sends is progress, too."""
        if self._moved.get(conn, (0, 0.0))[0] != nbytes:
            self._moved[conn] = (nbytes, self._clock())

    def at_s(self, conn: str) -> float:
        never = (0, float("-inf"))
        return max(self._seen.get(conn, never)[1], self._moved.get(conn, never)[1])

    def forget(self, conn: str) -> None:
        self._seen.pop(conn, None)
        self._moved.pop(conn, None)
