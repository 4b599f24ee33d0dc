"""Both ends of lanes that send no bytes: sending only takes time. Links, their opening and transfers are real.

An instance sends one payload after another, and receives one after another. Layers are sent as soon as a step has
written them, so when a prompt's last step ends, only its last layer or one payload remains to be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.costs.linear_costs import HandoverCost
from pd_cluster.engine.handover.links.link_ends import LinkName
from pd_cluster.engine.handover.shipping import MIN_LAYERS_NBYTES
from pd_cluster.kv.kv_layout import KVLayout, Lane
from pd_cluster.simulate.event_agenda import Agenda
from pd_cluster.transport.link_events import Arrived, Drained, Landed, Report
from pd_cluster.types import Note

TRANSPORT: wire.TransportName = "shm"
LAST_SHARE = 1 / 16  # the share of the last layer in the bytes of a step
ANY_NBYTES = 1 << 62


@dataclass(slots=True)
class Wires:
    """When an instance can next send and receive bytes. `step_s`: when its last step began.

    `credited_s`: transfer -> when its credit came.
    """

    send_free_s: float = 0.0
    receive_free_s: float = 0.0
    step_s: float = 0.0
    credited_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Cable:
    """Connects both ends of a lane. `end`: the receiving end, once it exists."""

    end: SimulatedReceiveEnd | None = None


class Cables:
    """All cables between instances, by connection."""

    def __init__(self, agenda: Agenda, cost: HandoverCost, token_nbytes: int) -> None:
        self.agenda, self.cost, self.token_nbytes = agenda, cost, token_nbytes
        self._by_conn: dict[str, Cable] = {}

    def of(self, conn: str) -> Cable:
        return self._by_conn.setdefault(conn, Cable())

    def close(self, conn: str) -> None:
        if (cable := self._by_conn.pop(conn, None)) is not None:
            cable.end = None  # bytes in flight are lost


class SimulatedLanes:
    """Implements link_ends.LaneEnds for one instance. `later` runs an action when the current step has ended."""

    def __init__(
        self,
        cables: Cables,
        wires: Wires,
        layout: KVLayout,
        send: Callable[[str, wire.Body], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.cables, self.wires, self.layout, self.send, self.later = cables, wires, layout, send, later

    def send_end(self, link: LinkName, index: int, lane: Lane, report: Report, note: Note) -> SimulatedSendEnd:
        return SimulatedSendEnd(self, link.conn)

    def receive_end(
        self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Note
    ) -> SimulatedReceiveEnd:
        return SimulatedReceiveEnd(self, conn, opened.link_id, index, report)

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return False


class SimulatedSendEnd:
    """Implements link_ends.SendEnd."""

    max_payload_nbytes = ANY_NBYTES
    probe_seed = 0

    def __init__(self, lanes: SimulatedLanes, conn: str) -> None:
        self._lanes, self._conn = lanes, conn
        self._cable = lanes.cables.of(conn)
        self.sent_nbytes = 0
        self._arrives_s: dict[str, float] = {}  # transfer -> when the last byte sent so far arrives
        self._num_tokens: dict[str, int] = {}  # transfer -> tokens sent so far

    @property
    def offers(self) -> list[wire.TransportOffer]:
        return [wire.TransportOffer(transport=TRANSPORT)]

    def open(self, transport: wire.TransportName, own: KVLayout, peer: KVLayout, /) -> None: ...
    def meet(self, value: wire.LinkValue, /) -> None: ...
    def settle(self) -> None: ...
    def probe(self) -> None: ...

    def ship(self, transfer_id: str, index: int, piece: wire.KVPiece, /) -> None:
        self._arrives_s.setdefault(transfer_id, 0.0)
        self._lanes.later(lambda: self._ship(transfer_id, piece.num_tokens))

    def _ship(self, transfer_id: str, num_tokens: int) -> None:
        cables, own, end = self._lanes.cables, self._lanes.wires, self._cable.end
        if end is None or transfer_id not in self._arrives_s:
            return
        their = end.wires
        nbytes, now_s, byte_s = num_tokens * cables.token_nbytes, cables.agenda.now(), cables.cost.byte_s
        since_s = max(own.step_s, own.credited_s.get(transfer_id, 0.0), own.send_free_s, their.receive_free_s)
        last_nbytes = max(LAST_SHARE * nbytes, min(nbytes, MIN_LAYERS_NBYTES))
        arrives_s = max(now_s + last_nbytes * byte_s, min(since_s, now_s) + nbytes * byte_s)
        if since_s > now_s:
            arrives_s = since_s + nbytes * byte_s
        own.send_free_s = their.receive_free_s = self._arrives_s[transfer_id] = arrives_s
        self._num_tokens[transfer_id] = self._num_tokens.get(transfer_id, 0) + num_tokens
        self.sent_nbytes += nbytes

    def ship_end(self, end: wire.KVEnd, /) -> None:
        self._arrives_s.setdefault(end.transfer_id, 0.0)
        self._lanes.later(lambda: self._ship_end(end))

    def _ship_end(self, end: wire.KVEnd) -> None:
        if (arrives_s := self._arrives_s.pop(end.transfer_id, None)) is None:
            return
        agenda, cost = self._lanes.cables.agenda, self._lanes.cables.cost
        nbytes = self._num_tokens.pop(end.transfer_id, 0) * self._lanes.cables.token_nbytes
        self._lanes.wires.credited_s.pop(end.transfer_id, None)
        arrives_s = max(agenda.now(), arrives_s)
        agenda.at(arrives_s + cost.setup_s, _land, self._cable, end, nbytes)

    def drop(self, transfer_id: str, /) -> None:
        self._arrives_s.pop(transfer_id, None)
        self._num_tokens.pop(transfer_id, None)
        self._lanes.wires.credited_s.pop(transfer_id, None)

    def close(self) -> None:
        self._lanes.cables.close(self._conn)


def _land(cable: Cable, end: wire.KVEnd, nbytes: int) -> None:
    if cable.end is not None:
        cable.end.received_nbytes += nbytes
        cable.end.report(Arrived(end.transfer_id))
        cable.end.report(Landed(end.transfer_id, end.first_tokens, nbytes))


class SimulatedReceiveEnd:
    """Implements link_ends.ReceiveEnd."""

    num_dropped = 0
    precision = ""

    def __init__(self, lanes: SimulatedLanes, conn: str, link_id: str, index: int, report: Report) -> None:
        self._lanes, self._conn, self._link_id, self._index, self.report = lanes, conn, link_id, index, report
        self.wires, self.received_nbytes = lanes.wires, 0

    def start(self) -> None:
        """Chooses the only transport. Its probe counts as arrived at once."""
        self._lanes.cables.of(self._conn).end = self
        info = self._lanes.layout.to_info()
        self._lanes.send(self._conn, wire.LinkAnswer(self._link_id, TRANSPORT, info, self._index))
        self._lanes.send(self._conn, wire.LinkReady(self._link_id, TRANSPORT, lane=self._index))

    def put(self, frame: wire.KVFrame, /) -> None: ...
    def meet(self, value: wire.LinkValue, /) -> None: ...
    def begin(self, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int, /) -> None: ...

    def forget(self, transfer_id: str, /) -> None:
        self.report(Drained(transfer_id))

    def close(self) -> None:
        self._lanes.cables.close(self._conn)
