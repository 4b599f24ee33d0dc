"""Links over pairs rest and wake: the state machines of both ends, joined by messages, without threads or sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.crossing import Crossing
from pd_cluster.engine.handover.in_links import InLinks
from pd_cluster.engine.handover.links import PeerProgress, Side
from pd_cluster.engine.handover.out_links import OutLinks
from pd_cluster.engine.handover.pairs import LinkPlaces, Rests
from pd_cluster.kv.layout import KVLayout, Lane, keys_and_values
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.events import Report
from pd_cluster.types import Note

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, planes=keys_and_values(8), block_size=4, dtype="float32")
TIMES = Timeouts(connect_timeout_s=5, transfer_timeout_s=30)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class SendEnd:
    """P's end of a lane; `net.pairs` counts the open ones."""

    net: Net
    conn: str
    offers: list[wire.TransportOffer] = field(default_factory=list)
    max_payload_nbytes: int = 1
    sent_nbytes: int = 0
    probe_seed: int = 0
    is_pair: bool = False

    def open(self, transport: str, own: KVLayout, peer: KVLayout) -> None:
        self.is_pair = transport == "dist"
        self.net.open_p[self.conn.split(">")[0]].update({self.conn} if self.is_pair else ())
        self.net.check()

    def meet(self, value: wire.LinkValue) -> None: ...
    def settle(self) -> None: ...
    def probe(self) -> None: ...
    def ship(self, transfer_id: str, index: int, piece: wire.KVPiece) -> None: ...
    def ship_end(self, end: wire.KVEnd) -> None: ...
    def drop(self, transfer_id: str) -> None: ...

    def close(self) -> None:
        self.net.open_p[self.conn.split(">")[0]].discard(self.conn)


@dataclass
class ReceiveEnd:
    net: Net
    conn: str
    opened: wire.LinkOpen
    received_nbytes: int = 0
    num_dropped: int = 0
    precision: str = ""

    def start(self) -> None:
        d, transport = self.conn.split(">")[1].split("#")[0], self.opened.lanes[0].offers[0].transport
        if transport == "dist":
            self.net.open_d[d].add(self.conn)
            self.net.check()
        reply = self.net.to_p(self.conn)
        reply(wire.LinkAnswer(self.opened.link_id, transport, LAYOUT.to_info()))
        if self.net.works:
            reply(wire.LinkReady(self.opened.link_id, transport))
        else:
            reply(wire.LinkRefused(self.opened.link_id, "the pair does not open", True))

    def put(self, frame: wire.KVFrame) -> None: ...
    def meet(self, value: wire.LinkValue) -> None: ...
    def begin(self, *_: object) -> None: ...
    def forget(self, transfer_id: str) -> None: ...

    def close(self) -> None:
        self.net.open_d[self.conn.split(">")[1].split("#")[0]].discard(self.conn)


class Net:
    """Prefill and decode instances whose messages arrive in order.

    `hosts`: by instance, of those that the scheduler has named; `trusting`: the instances with --trust-network.
    """

    def __init__(
        self,
        num_p: int,
        num_d: int,
        most_p: int,
        most_d: int,
        transport: str = "dist",
        hosts: Mapping[str, str] | None = None,
        trusting: Collection[str] = (),
    ) -> None:
        self._hosts, self._trusting = hosts or {}, trusting
        self.clock = Clock()
        self.transport, self.works = transport, True
        self.most_p, self.most_d = most_p, most_d
        self.mail: deque[tuple[str, bool, wire.Body]] = deque()  # connection, to P, body
        self.live: set[str] = set()
        self.num_conns = 0
        self.p = {f"p{at}": PEnd(self, f"p{at}") for at in range(num_p)}
        self.open_p: dict[str, set[str]] = {name: set() for name in self.p}
        self.d = {f"d{at}": DEnd(self, f"d{at}") for at in range(num_d)}
        self.open_d: dict[str, set[str]] = {name: set() for name in self.d}
        self.num_opened = 0
        for p in self.p.values():
            p.set_peers(list(self.d))

    def crossing(self, name: str) -> Crossing:
        made = Crossing(f"{name}@1", name in self._trusting)
        made.hear(
            [
                wire.PeerInfo(name=each, epoch=1, role="decode", host=host, control_port=1, public_key=b"")
                for each, host in self._hosts.items()
            ]
        )
        return made

    def to_p(self, conn: str):  # type: ignore[no-untyped-def]
        return lambda body: self.mail.append((conn, True, body))

    def check(self) -> None:
        for most, places in ((self.most_p, self.open_p), (self.most_d, self.open_d)):
            for name, conns in places.items():
                assert not most or len(conns) <= most, f"{name} has {len(conns)} pairs open"
        self.num_opened += 1

    def run(self, ticks: int = 6) -> None:
        for _ in range(ticks):
            for p in self.p.values():
                p.links.tick()
            while self.mail:
                conn, to_p, body = self.mail.popleft()
                if conn in self.live:
                    (self.p[conn.split(">")[0]] if to_p else self.d[conn.split(">")[1].split("#")[0]]).read(conn, body)
            self.clock.now_s += 0.1

    def states(self, p: str) -> dict[str, str]:
        return {peer.split("@")[0]: str(state) for peer, state in self.p[p].links.states().items()}

    def hand_over(self, p: str, d: str) -> str:
        """Starts a transfer, or waits for its link."""
        return self.p[p].admit(d)


class PEnd:
    def __init__(self, net: Net, name: str) -> None:
        self.net, self.name = net, name
        self.busy: dict[str, int] = {}
        self.woken: list[str] = []
        self.lost: list[tuple[str, str]] = []
        side = Side(f"{name}@1", b"s", "m", Numerics(), LAYOUT, 8, 0, wire.KVOptions(), net.crossing(name))
        rests = Rests(
            net.most_p,
            uses=lambda conn: self.busy.get(conn, 0) > 0,
            woken=self._woken,
            lost=lambda peer, reason: self.lost.append((peer, reason)),
        )
        self.links = OutLinks(
            side,
            self,
            self,  # type: ignore[arg-type]
            lambda event: None,
            lambda conn, reason: None,
            PeerProgress(net.clock),
            net.clock,
            TIMES,
            rests=rests,
        )

    def _woken(self, peer: str, conn: str) -> None:
        self.woken.append(peer)
        self.busy[conn] = self.busy.get(conn, 0) + 1

    def admit(self, d: str) -> str:
        conn = self.links.link_to(f"{d}@1")
        if conn is not None:
            self.busy[conn] = self.busy.get(conn, 0) + 1
            self.links.ship(conn, "t", 0, wire.KVPiece(0, 4, 0, 1, [0]))
            return "offered"
        return "awaits" if self.links.awaken(f"{d}@1") else "no link"

    def end(self) -> None:
        self.busy.clear()

    def set_peers(self, names: list[str]) -> None:
        self.links.set_peers(
            [
                wire.PeerInfo(name=each, epoch=1, role="decode", host="h", control_port=1, public_key=b"", tp_size=1)
                for each in names
            ]
        )

    def send_end(
        self, conn: str, link_id: str, peer: str, index: int, lane: Lane, report: Report, note: Note
    ) -> SendEnd:
        return SendEnd(self.net, conn, [wire.TransportOffer(transport=self.net.transport)])

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        self.net.num_conns += 1
        conn = f"{self.name}>{name}#{self.net.num_conns}"
        self.net.live.add(conn)
        self.net.mail.append((conn, True, wire.Heartbeat(None)))
        return conn

    def disconnect(self, conn: str) -> None:
        self.net.live.discard(conn)
        d = self.net.d[conn.split(">")[1].split("#")[0]]
        d.links.on_down(conn, "ended")

    def send(self, conn: str, body: wire.Body) -> None:
        self.net.mail.append((conn, False, body))

    def beat(self) -> None: ...
    def beat_soon(self) -> None: ...

    def read(self, conn: str, body: wire.Body) -> None:
        match body:
            case wire.Heartbeat():  # here it stands for the connection that opens
                self.links.on_opened(conn)
            case wire.LinkAnswer():
                self.links.on_answer(conn, body)
            case wire.LinkReady():
                self.links.on_ready(conn, body)
            case wire.LinkRest():
                self.links.on_rest(conn, body)
            case wire.LinkYield():
                self.links.on_yield(conn, body)
            case wire.LinkQueued():
                self.links.on_queued(conn, body)
            case wire.LinkRefused():
                self.links.on_refused(conn, body)


class DEnd:
    def __init__(self, net: Net, name: str) -> None:
        self.net, self.places = net, LinkPlaces(net.most_d)
        side = Side(f"{name}@1", b"s", "m", Numerics(), LAYOUT, 8, 0, wire.KVOptions(), net.crossing(name))
        self.links = InLinks(
            side,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda event: None,
            lambda conn, reason: None,
            PeerProgress(net.clock),
            places=self.places,
        )

    def receive_end(
        self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Note
    ) -> ReceiveEnd:
        return ReceiveEnd(self.net, conn, opened)

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return opened.lanes[0].offers[0].transport == "dist"

    def send(self, conn: str, body: wire.Body) -> None:
        self.net.mail.append((conn, True, body))

    def read(self, conn: str, body: wire.Body) -> None:
        match body:
            case wire.LinkOpen():
                self.links.on_open(conn, f"{conn.split('>')[0]}@1", body, True)
            case wire.LinkRest():
                self.links.on_rest(conn, body)


def test_links_beyond_the_limit_rest_and_are_routed() -> None:
    net = Net(1, 4, 2, 0)
    net.run()
    states = net.states("p0")
    assert sorted(states.values()) == ["resting", "resting", "up (dist)", "up (dist)"]
    assert all(state.is_up for state in net.p["p0"].links.states().values()), "all four may be routed"


def test_a_transfer_wakes_its_link_and_the_least_recently_used_one_rests() -> None:
    net = Net(1, 3, 2, 0)
    net.run()
    assert [net.hand_over("p0", name) for name in ("d0", "d1", "d2")] == ["offered", "offered", "awaits"]
    net.p["p0"].end()
    net.clock.now_s += 1
    assert net.hand_over("p0", "d0") == "offered"  # now d1 was used least recently
    net.p["p0"].end()
    net.run()
    assert net.p["p0"].woken == ["d2@1"]
    assert net.states("p0") == {"d0": "up (dist)", "d1": "resting", "d2": "up (dist)"}


def test_links_in_use_end_their_transfers_first_and_take_no_more() -> None:
    net = Net(1, 3, 2, 0)
    net.run()
    assert [net.hand_over("p0", name) for name in ("d0", "d1", "d2")] == ["offered", "offered", "awaits"]
    net.run()
    assert net.p["p0"].woken == [], "both links are in use"
    leaving = [name for name in ("d0", "d1") if net.p["p0"].links.link_to(f"{name}@1") is None]
    assert len(leaving) == 1, "one of them takes no more transfers"
    assert net.hand_over("p0", leaving[0]) == "awaits"
    net.p["p0"].end()
    net.run(20)
    assert set(net.p["p0"].woken) == {"d2@1", f"{leaving[0]}@1"}, "each has had its turn, the first one first"
    assert net.p["p0"].woken[0] == "d2@1"


def test_the_decode_instance_has_a_limit_of_its_own() -> None:
    net = Net(4, 1, 0, 2)
    net.run()
    assert sorted(net.states(f"p{at}")["d0"] for at in range(4)) == ["resting", "resting", "up (dist)", "up (dist)"]
    sleeping = [name for name in net.p if net.states(name)["d0"] == "resting"]
    for name in sleeping:
        assert net.hand_over(name, "d0") == "awaits"
    net.run(20)
    assert all(net.p[name].woken == ["d0@1"] for name in sleeping), "D has asked the idle ones to rest"
    assert sorted(net.states(f"p{at}")["d0"] for at in range(4)) == ["resting", "resting", "up (dist)", "up (dist)"]


@pytest.mark.parametrize(("most_p", "most_d"), [(1, 1), (1, 2), (2, 1), (3, 2), (0, 1), (1, 0)])
def test_every_pair_gets_its_turn(most_p: int, most_d: int) -> None:
    """Limits of both kinds together: no place waits for a place."""
    net = Net(3, 3, most_p, most_d)
    net.run()
    wanted = [(p, d) for p in net.p for d in net.d]
    offered = {(p, d) for p, d in wanted if net.hand_over(p, d) == "offered"}
    for _ in range(40):
        for p in net.p.values():
            p.end()
        net.run(3)
    woken = {(name, peer.split("@")[0]) for name, p in net.p.items() for peer in p.woken}
    assert offered | woken == set(wanted)


def test_links_that_need_no_pair_never_rest() -> None:
    net = Net(2, 4, 1, 1, transport="shm")
    net.run()
    assert {state for p in net.p for state in net.states(p).values()} == {"up (shm)"}


def test_without_a_limit_all_are_open() -> None:
    net = Net(2, 3, 0, 0)
    net.run()
    assert {state for p in net.p for state in net.states(p).values()} == {"up (dist)"}


def test_a_pair_that_fails_to_wake_is_proven_before_it_is_routed_again() -> None:
    net = Net(1, 2, 1, 0)
    net.run()
    (resting,) = [name for name, state in net.states("p0").items() if state == "resting"]
    assert net.hand_over("p0", resting) == "awaits"
    net.works = False
    net.run()
    assert net.p["p0"].lost == [(f"{resting}@1", "the pair does not open")]
    assert net.states("p0")[resting].startswith("waiting"), "it is not routed"
    net.works = True
    net.clock.now_s += 10
    net.run(20)
    assert net.states("p0")[resting] == "up (dist)", "it was proven, although nothing waits for it"


def test_a_decode_instance_that_leaves_while_its_link_wakes_holds_no_place() -> None:
    net = Net(1, 2, 1, 0)
    net.run()
    p = net.p["p0"]
    (resting,) = [name for name, state in net.states("p0").items() if state == "resting"]
    (other,) = {"d0", "d1"} - {resting}
    assert net.hand_over("p0", resting) == "awaits"
    p.links.tick()  # the open link begins to rest
    p.links.tick()
    p.set_peers([other])
    assert [peer for peer, _ in p.lost] == [f"{resting}@1"]
    net.run(20)
    assert net.hand_over("p0", other) == "awaits"
    net.run(20)
    assert net.states("p0") == {other: "up (dist)"}


def test_a_decode_instance_that_never_confirms_the_rest_does_not_keep_the_place() -> None:
    net = Net(1, 2, 1, 0)
    net.run()
    p = net.p["p0"]
    (resting,) = [name for name, state in net.states("p0").items() if state == "resting"]
    (open_,) = {"d0", "d1"} - {resting}
    net.d[open_].read = lambda conn, body: None  # type: ignore[method-assign]  # it is stopped
    assert net.hand_over("p0", resting) == "awaits"
    net.run()
    assert p.woken == [f"{resting}@1"], "the place is free at once"
    assert net.states("p0")[open_] == "resting"
    net.clock.now_s += TIMES.connect_timeout_s
    net.run()
    assert not any(conn.split(">")[1].startswith(open_) for conn in net.live), "the connection is given up"


def test_a_prefill_instance_that_dies_in_the_queue_is_forgotten() -> None:
    net = Net(3, 1, 0, 1)
    net.run()
    sleeping = [name for name in net.p if net.states(name)["d0"] == "resting"]
    (awake,) = set(net.p) - set(sleeping)
    assert net.hand_over(awake, "d0") == "offered"  # in use: the others must wait
    for name in sleeping:
        assert net.hand_over(name, "d0") == "awaits"
    net.run()
    places = net.d["d0"].places
    assert len(places.queue) == 2
    net.p[sleeping[0]].set_peers([])  # its connection goes down
    assert len(places.queue) == 1
    net.p[awake].end()
    net.run(20)
    assert net.p[sleeping[1]].woken == ["d0@1"]
    assert len(places.queue) == 0
