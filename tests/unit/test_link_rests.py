"""Idle pair links close and reopen: both ends' state machines exchange messages, without threads or sockets."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.in_lanes import InLanes
from pd_cluster.engine.handover.links.in_links import InLinks
from pd_cluster.engine.handover.links.link_ends import LinkName, LocalEndpoint, PeerProgress
from pd_cluster.engine.handover.links.network_policy import NetworkPolicy
from pd_cluster.engine.handover.links.out_link_table import OutLinkTable
from pd_cluster.engine.handover.links.out_links import OutLinks
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, planes=keys_and_values(8), block_size=4, dtype="float32")
TIMES = Timeouts(connect_timeout_s=5, transfer_timeout_s=30)


def p_of(conn: str) -> str:
    return conn.split(">")[0]


def d_of(conn: str) -> str:
    return conn.split(">")[1].split("#")[0]


def endpoint(name: str, network_policy: NetworkPolicy) -> LocalEndpoint:
    return LocalEndpoint(f"{name}@1", b"s", "m", Numerics(), (LAYOUT,), (8,), wire.KVOptions(), network_policy)


def info_of(name: str, host: str) -> wire.PeerInfo:
    return wire.PeerInfo(name=name, epoch=1, role="decode", host=host, control_port=1, public_key=b"", tp_size=1)


def ignored(self: object, *_: object) -> None: ...


class End:
    """One end of a lane; the net counts the open pairs."""

    max_payload_nbytes, sent_nbytes, received_nbytes, num_dropped, probe_seed, precision = 1, 0, 0, 0, 0, ""
    meet = settle = ship = ship_end = drop = put = begin = forget = ignored
    num_probes = 0

    def __init__(self, net: Net, conn: str, holder: str, opened: wire.LinkOpen | None = None) -> None:
        self._net, self._conn, self._opened, self._pairs = net, conn, opened, net.pairs[holder]
        self.offers = [wire.TransportOffer(transport=net.transport)]
        self.is_pair = False

    def open(self, transport: str, *_: object) -> None:
        """Opens P's end."""
        self.is_pair = transport == "dist"
        self._pairs.update({self._conn} if self.is_pair else ())
        self._net.check()

    def start(self) -> None:
        """Starts D's end."""
        assert self._opened is not None
        link_id, transport = self._opened.link_id, self._opened.lanes[0].offers[0].transport
        self.open(transport)
        refused = wire.LinkRefused(link_id, "the pair does not open", True)
        for body in (
            wire.LinkAnswer(link_id, transport, LAYOUT.to_info()),
            wire.LinkReady(link_id, transport) if self._net.works else refused,
        ):
            self._net.mail.append((self._conn, True, body))

    def probe(self) -> None:
        self.num_probes += 1

    def close(self) -> None:
        self._pairs.discard(self._conn)


class Net:
    """Prefill and decode instances whose messages arrive in order.

    `hosts`: instance -> host, for instances named by the scheduler; `trusting`: instances with --trust-network.
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
        self.now_s, self.transport, self.works = 0.0, transport, True
        self.most = {"p": most_p, "d": most_d}
        self.mail: deque[tuple[str, bool, wire.Body]] = deque()  # (connection, whether to P, body)
        self.live: set[str] = set()
        self.pairs: dict[str, set[str]] = defaultdict(set)  # instance -> its open pairs
        self.num_conns = 0
        self.d = {f"d{at}": DEnd(self, f"d{at}") for at in range(num_d)}
        self.p = {f"p{at}": PEnd(self, f"p{at}") for at in range(num_p)}
        for p in self.p.values():
            p.set_peers(list(self.d))

    def endpoint(self, name: str) -> LocalEndpoint:
        network_policy = NetworkPolicy(f"{name}@1", name in self._trusting)
        network_policy.set_peers([info_of(each, host) for each, host in self._hosts.items()])
        return endpoint(name, network_policy)

    def context(self, end: Any, name: str, most: int) -> HandoverContext:
        return HandoverContext(self.endpoint(name), end, end, ignored, TIMES, lambda: self.now_s, kv_open_links=most)

    def check(self) -> None:
        for name, conns in self.pairs.items():
            most = self.most[name[0]]
            assert not most or len(conns) <= most, f"{name} has {len(conns)} pairs open"

    def run(self, ticks: int = 6) -> None:
        for _ in range(ticks):
            for p in self.p.values():
                p.links.tick()
            while self.mail:
                conn, to_p, body = self.mail.popleft()
                if conn in self.live:
                    (self.p[p_of(conn)] if to_p else self.d[d_of(conn)]).read(conn, body)
                for p in self.p.values():
                    assert p.links.states() == {peer: link.shown for peer, link in p.table.by_peer.items()}
            self.now_s += 0.1

    def states(self, p: str) -> dict[str, str]:
        return {peer.split("@")[0]: str(state) for peer, state in self.p[p].links.states().items()}

    def hand_over(self, p: str, d: str) -> str:
        """Offers a transfer, or waits for its link; returns which."""
        return self.p[p].admit(d)


class PEnd:
    beat = beat_soon = ignored

    def __init__(self, net: Net, name: str) -> None:
        self.net, self.name = net, name
        self.busy: Counter[str] = Counter()
        self.woken: list[str] = []
        self.lost: list[tuple[str, str]] = []
        context = net.context(self, name, net.most["p"])
        self.table = OutLinkTable(context, PeerProgress(context.clock))
        self.links = OutLinks(context, self.table, self)

    # ---- the transfers

    def uses(self, conn: str) -> bool:
        return self.busy[conn] > 0

    def link_up(self, peer: str, conn: str) -> None:
        self.woken.append(peer)
        self.busy[conn] += 1

    def link_lost(self, peer: str, reason: str) -> None:
        self.lost.append((peer, reason))

    on_link_down = ignored

    def admit(self, d: str) -> str:
        conn = self.table.link_to(f"{d}@1")
        if conn is None:
            return "awaits" if self.table.awaken(f"{d}@1") else "no link"
        self.busy[conn] += 1
        self.table.ship(conn, 0, "t", 0, wire.KVPiece(0, 4, 0, 1, [0]))
        return "offered"

    def end(self) -> None:
        self.busy.clear()

    def set_peers(self, names: list[str]) -> None:
        self.links.set_peers([info_of(each, "h") for each in names])

    def send_end(self, link: LinkName, *_: object) -> End:
        return End(self.net, link.conn, self.name)

    def connect(self, name: str, *_: object) -> str:
        self.net.num_conns += 1
        conn = f"{self.name}>{name}#{self.net.num_conns}"
        self.net.live.add(conn)
        self.net.mail.append((conn, True, wire.Heartbeat(None)))
        return conn

    def disconnect(self, conn: str) -> None:
        self.net.live.discard(conn)
        self.net.d[d_of(conn)].links.on_down(conn, "ended")

    def send(self, conn: str, body: wire.Body) -> None:
        self.net.mail.append((conn, False, body))

    def read(self, conn: str, body: wire.Body) -> None:
        links = self.links
        if isinstance(body, wire.Heartbeat):  # represents an opening connection here
            return links.on_opened(conn)
        hear: dict[type[wire.Body], Callable[[str, Any], None]] = {
            wire.LinkAnswer: links.on_answer,
            wire.LinkReady: links.on_ready,
            wire.LinkRest: links.on_rest,
            wire.LinkYield: links.on_yield,
            wire.LinkQueued: links.on_queued,
            wire.LinkRefused: links.on_refused,
        }
        return hear[type(body)](conn, body)


class DEnd:
    def __init__(self, net: Net, name: str) -> None:
        self.net, self.name = net, name
        context = net.context(self, name, net.most["d"])
        lanes = InLanes(context, PeerProgress(context.clock))
        self.limit = lanes.limit
        self.links = InLinks(context, lanes, cast(Any, self))

    on_link_down = ignored

    def receive_end(self, conn: str, peer: str, opened: wire.LinkOpen, *_: object) -> End:
        return End(self.net, conn, self.name, opened)

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return opened.lanes[0].offers[0].transport == "dist"

    def send(self, conn: str, body: wire.Body) -> None:
        self.net.mail.append((conn, True, body))

    def read(self, conn: str, body: wire.Body) -> None:
        if isinstance(body, wire.LinkOpen):
            self.links.on_open(conn, f"{p_of(conn)}@1", body, True)
        elif isinstance(body, wire.LinkRest):
            self.links.on_rest(conn, body)


def resting_and_open(net: Net) -> tuple[str, str]:
    """Returns the decode instances of P's resting link and of its open one."""
    net.run()
    (resting,) = [name for name, state in net.states("p0").items() if state == "resting"]
    (other,) = {"d0", "d1"} - {resting}
    return resting, other


def test_links_beyond_the_limit_rest_and_are_routed() -> None:
    net = Net(1, 4, 2, 0)
    net.run()
    states = net.states("p0")
    assert sorted(states.values()) == ["resting", "resting", "up (dist)", "up (dist)"]
    assert all(state.is_up for state in net.p["p0"].links.states().values()), "all four must be routable"


def test_a_transfer_wakes_its_link_and_the_least_recently_used_one_rests() -> None:
    net = Net(1, 3, 2, 0)
    net.run()
    assert [net.hand_over("p0", name) for name in ("d0", "d1", "d2")] == ["offered", "offered", "awaits"]
    net.p["p0"].end()
    net.now_s += 1
    assert net.hand_over("p0", "d0") == "offered"  # now d1 is the least recently used
    net.p["p0"].end()
    net.run()
    assert net.p["p0"].woken == ["d2@1"]
    assert net.states("p0") == {"d0": "up (dist)", "d1": "resting", "d2": "up (dist)"}


def test_links_in_use_end_their_transfers_first_and_take_no_more() -> None:
    net = Net(1, 3, 2, 0)
    net.run()
    assert [net.hand_over("p0", name) for name in ("d0", "d1", "d2")] == ["offered", "offered", "awaits"]
    net.run()
    assert net.p["p0"].woken == [], "no link may be closed while both are in use"
    leaving = [name for name in ("d0", "d1") if net.p["p0"].table.link_to(f"{name}@1") is None]
    assert len(leaving) == 1, "one of them must take no more transfers"
    assert net.hand_over("p0", leaving[0]) == "awaits"
    net.p["p0"].end()
    net.run(20)
    assert set(net.p["p0"].woken) == {"d2@1", f"{leaving[0]}@1"}, "each must get its turn, in order"
    assert net.p["p0"].woken[0] == "d2@1"


def test_the_decode_instance_has_a_limit_of_its_own() -> None:
    net = Net(4, 1, 0, 2)
    net.run()
    assert sorted(net.states(f"p{at}")["d0"] for at in range(4)) == ["resting", "resting", "up (dist)", "up (dist)"]
    sleeping = [name for name in net.p if net.states(name)["d0"] == "resting"]
    for name in sleeping:
        assert net.hand_over(name, "d0") == "awaits"
    net.run(20)
    assert all(net.p[name].woken == ["d0@1"] for name in sleeping), "D must ask idle links to rest"
    assert sorted(net.states(f"p{at}")["d0"] for at in range(4)) == ["resting", "resting", "up (dist)", "up (dist)"]


@pytest.mark.parametrize(("most_p", "most_d"), [(1, 1), (1, 2), (3, 2), (0, 1)])
def test_every_pair_gets_its_turn(most_p: int, most_d: int) -> None:
    """With limits at both ends, no deadlock: every pair of instances gets a link in turn."""
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


def test_a_link_is_probed_once_it_was_unused_for_a_while() -> None:
    net = Net(1, 2, 0, 0, transport="shm")
    net.run()
    used, unused = (net.p["p0"].table.by_peer[f"d{at}@1"] for at in range(2))
    for _ in range(3):
        before = [link.lanes[0].end.num_probes for link in (used, unused)]
        for _ in range(4):
            net.now_s += 0.3 * TIMES.link_keepalive_s
            used.used_s = net.now_s
            net.run(1)
        assert [link.lanes[0].end.num_probes for link in (used, unused)] == [before[0], before[1] + 1]


def test_a_pair_that_fails_to_wake_is_proven_before_it_is_routed_again() -> None:
    net = Net(1, 2, 1, 0)
    resting, _ = resting_and_open(net)
    assert net.hand_over("p0", resting) == "awaits"
    net.works = False
    net.run()
    assert net.p["p0"].lost == [(f"{resting}@1", "the pair does not open")]
    assert net.states("p0")[resting].startswith("waiting"), "it must not be routable"
    net.works = True
    net.now_s += 10
    net.run(20)
    assert net.states("p0")[resting] == "up (dist)", "it must be proven, although no transfer waits for it"


def test_a_decode_instance_that_leaves_while_its_link_wakes_holds_no_place() -> None:
    net = Net(1, 2, 1, 0)
    (resting, other), p = resting_and_open(net), net.p["p0"]
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
    (resting, open_), p = resting_and_open(net), net.p["p0"]
    net.d[open_].read = lambda conn, body: None  # type: ignore[method-assign]  # it is stopped
    assert net.hand_over("p0", resting) == "awaits"
    net.run()
    assert p.woken == [f"{resting}@1"], "the place must be free at once"
    assert net.states("p0")[open_] == "resting"
    net.now_s += TIMES.connect_timeout_s
    net.run()
    assert not any(conn.split(">")[1].startswith(open_) for conn in net.live), "the connection must be closed"


def test_a_prefill_instance_that_dies_in_the_queue_is_forgotten() -> None:
    net = Net(3, 1, 0, 1)
    net.run()
    sleeping = [name for name in net.p if net.states(name)["d0"] == "resting"]
    (awake,) = set(net.p) - set(sleeping)
    assert net.hand_over(awake, "d0") == "offered"  # in use, so the others must wait
    for name in sleeping:
        assert net.hand_over(name, "d0") == "awaits"
    net.run()
    limit = net.d["d0"].limit
    assert len(limit.queue) == 2
    net.p[sleeping[0]].set_peers([])  # its connection goes down
    assert len(limit.queue) == 1
    net.p[awake].end()
    net.run(20)
    assert net.p[sleeping[1]].woken == ["d0@1"]
    assert len(limit.queue) == 0
