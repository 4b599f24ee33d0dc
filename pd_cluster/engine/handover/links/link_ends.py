"""Parts that both ends of a link share: the mailbox's interface, this end's pools, and peers' progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NamedTuple, Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.links.network_policy import NetworkPolicy
from pd_cluster.kv.kv_layout import KVLayout, Lane
from pd_cluster.numerics import Numerics
from pd_cluster.transport.link_events import Report
from pd_cluster.transport.link_frames import LinkKey
from pd_cluster.transport.receive_thread import ReceiveThread
from pd_cluster.transport.send_thread import SendThread
from pd_cluster.types import Note


class Post(Protocol):
    """The part of the mailbox that links need."""

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str: ...
    def disconnect(self, conn: str) -> None: ...
    def send(self, conn: str, body: wire.Body) -> None: ...
    def beat(self) -> None: ...
    def beat_soon(self) -> None: ...


AfterSteps = Annotated[None, "after steps"]  # another rank runs the call once its steps are as far as the caller's
AtOnce = Annotated[None, "at once"]  # another rank runs the call at once: an earlier call may wait for it


class SendEnd(Protocol):
    """P's end of a lane, in this process (transport/send_thread.py) or on another rank (ranks/remote_lanes.py)."""

    max_payload_nbytes: int
    sent_nbytes: int
    probe_seed: int

    @property
    def offers(self) -> list[wire.TransportOffer] | None:
        """The transports that this end offers; None: not known yet, `Offered` will follow."""

    def open(self, transport: wire.TransportName, own: KVLayout, peer: KVLayout, /) -> None: ...
    def meet(self, value: wire.LinkValue, /) -> AtOnce: ...
    def settle(self) -> None: ...
    def probe(self) -> None: ...
    def ship(self, transfer_id: str, index: int, piece: wire.KVPiece, /) -> AfterSteps: ...
    def ship_end(self, end: wire.KVEnd, /) -> AfterSteps: ...
    def drop(self, transfer_id: str, /) -> None: ...
    def close(self) -> None: ...


class ReceiveEnd(Protocol):
    """D's end of a lane, in this process (transport/receive_thread.py) or on another rank (ranks/remote_lanes.py)."""

    @property
    def received_nbytes(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...
    @property
    def precision(self) -> str: ...

    def start(self) -> None: ...
    def put(self, frame: wire.KVFrame, /) -> None: ...
    def meet(self, value: wire.LinkValue, /) -> AtOnce: ...
    def begin(self, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int, /) -> AfterSteps: ...
    def forget(self, transfer_id: str, /) -> None: ...
    def close(self) -> None: ...


class LinkName(NamedTuple):
    """A link to a peer (name@epoch). `conn`: its connection. `link_id`: the sender's random name for the link."""

    conn: str
    link_id: str
    peer: str


class LaneEnds(Protocol):
    """Creates the ends of lanes on this instance's ranks: `LocalLanes`, or engine/ranks/remote_lanes.py."""

    def send_end(self, link: LinkName, index: int, lane: Lane, report: Report, note: Note) -> SendEnd:
        """Creates the end of lane `index` of a link. Raises LinkError."""

    def receive_end(
        self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Note
    ) -> ReceiveEnd:
        """Raises LinkError."""

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        """Whether the first transport that D would try needs a process group of two ranks."""


class LinkThreads(Protocol):
    """Creates the thread of a lane's end in this process; transport/link_factory.py."""

    def send_thread(
        self, conn: str, key: LinkKey, post: Callable[[wire.Body], None], report: Report, note: Note, group: int
    ) -> SendThread:
        """`group`: the group of layers whose pool is sent. Raises LinkError."""

    def receive_thread(
        self,
        conn: str,
        opened: wire.LinkOpen,
        key: LinkKey,
        post: Callable[[wire.Body], None],
        report: Report,
        note: Note,
    ) -> ReceiveThread:
        """Raises LinkError."""

    def needs_pair(self, opened: wire.LinkOpen) -> bool: ...


class LocalLanes:
    """Creates ends of lanes in this process. `send(conn, body)` posts over a connection."""

    def __init__(self, endpoint: LocalEndpoint, threads: LinkThreads, send: Callable[[str, wire.Body], None]) -> None:
        self._endpoint = endpoint
        self._threads = threads
        self._send = send

    def send_end(self, link: LinkName, index: int, lane: Lane, report: Report, note: Note) -> SendThread:
        key = self._endpoint.key(link.link_id, self._endpoint.own, link.peer, index)
        return self._threads.send_thread(link.conn, key, partial(self._send, link.conn), report, note, lane.group)

    def receive_end(
        self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Note
    ) -> ReceiveThread:
        key = self._endpoint.key(opened.link_id, peer, self._endpoint.own, index)
        return self._threads.receive_thread(conn, opened, key, partial(self._send, conn), report, note)

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        """Decides by the first lane, which ends in this process; the link's other lanes need the same."""
        return self._threads.needs_pair(opened)


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """This process's properties that a link needs: its identity, and its pools, one for each group of layers."""

    own: str  # name@epoch
    secret: bytes
    model_identity: str
    numerics: Numerics
    layouts: tuple[KVLayout, ...]
    num_blocks: tuple[int, ...]
    options: wire.KVOptions
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)

    def key(self, link_id: str, sender: str, receiver: str, lane: int = 0) -> LinkKey:
        return LinkKey.derive(self.secret, link_id, sender, receiver, self.options.hmac, lane)


def joined_precision(precisions: Iterable[str]) -> str:
    """Joins the descriptions of several lanes' losses of precision, each once; "" if there is no loss."""
    return ", ".join(dict.fromkeys(each for each in precisions if each))


class PeerProgress:
    """The time at which each connection's peer last made progress."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}
        self._moved: dict[str, tuple[int, float]] = {}

    def heard(self, conn: str, load: wire.Load) -> None:
        if self._seen.get(conn, (-1, 0.0))[0] != load.progress:
            self._seen[conn] = (load.progress, self._clock())

    def moved(self, conn: str, nbytes: int) -> None:
        """Records how many bytes have been received over the connection. Data from the peer counts as progress, too."""
        if self._moved.get(conn, (0, 0.0))[0] != nbytes:
            self._moved[conn] = (nbytes, self._clock())

    def at_s(self, conn: str) -> float:
        never = (0, float("-inf"))
        return max(self._seen.get(conn, never)[1], self._moved.get(conn, never)[1])

    def forget(self, conn: str) -> None:
        self._seen.pop(conn, None)
        self._moved.pop(conn, None)
