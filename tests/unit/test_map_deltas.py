"""Snapshots and deltas keep receivers' maps equal to senders', whatever changes and whichever peers come or go."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.net.map_deltas import DeltaLost, LinkReceiver, LinkSender, PeersReceiver, PeersSender
from pd_cluster.net.peer_admission import Fence
from pd_cluster.types import LinkState, Role

PHASES = [LinkState.parse(each) for each in ("up (shm)", "resting", "waiting: x", "opening")]
ROLES: tuple[Role, ...] = ("prefill", "decode")


def peer(name: str, epoch: int, role: Role = "decode") -> wire.PeerInfo:
    return wire.PeerInfo(name=name, epoch=epoch, role=role, host="h", control_port=1, public_key=b"k" * 32)


def test_a_scheduler_knows_the_links_that_a_worker_has() -> None:
    """Connections open and close at any time; each begins with a snapshot of all links, then gets changes only."""
    for seed in range(100):
        rng, links, sides = random.Random(seed), dict[str, LinkState](), dict[int, tuple[LinkSender, LinkReceiver]]()
        for step in range(60):
            match rng.randrange(6):
                case 0:
                    sides[step] = LinkSender(), LinkReceiver()
                case 1 if sides:
                    del sides[rng.choice(list(sides))]
                case 2 if links:
                    gone = rng.choice(list(links))
                    links = {key: state for key, state in links.items() if key != gone}
                case 3 | 4:
                    links = {**links, f"decode-{rng.randrange(9)}@{rng.randrange(3):x}": rng.choice(PHASES)}
            for conn, (sender, receiver) in sides.items():
                told = sender.with_changes(wire.Load(num_steps=step), links)
                heard = receiver.merged(msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=wire.Load))
                assert heard == wire.Load(num_steps=step, links=links), (seed, step)
                if conn != step:
                    assert len(told.links) + len(told.gone_links) <= 1, "expected only changes"
                again = receiver.merged(sender.with_changes(wire.Load(), links))
                assert not links or again.links is heard.links, "derived state must be kept"


def test_a_worker_knows_the_peers_that_its_owner_names() -> None:
    """Every worker has the whole list through changes of terms, connections, processes and roles."""
    for seed in range(100):
        rng, sender, term = random.Random(seed), PeersSender(), 1
        peers: dict[str, wire.PeerInfo] = {}
        receivers: defaultdict[str, PeersReceiver] = defaultdict(PeersReceiver)
        conns, known = dict[str, str](), dict[str, list[wire.PeerInfo]]()
        for step in range(60):
            before, is_term = dict(peers), False
            name = f"worker-{rng.randrange(6)}"
            match rng.randrange(6):
                case 0:
                    term, is_term = term + 1, True
                case 1:
                    peers.pop(name, None)
                    conns.pop(name, None)
                case 2 if name in peers:
                    conns[name] = f"{name}#{step}"  # the connection was lost unnoticed by the others
                case 3 if name in peers:
                    peers[name] = msgspec.structs.replace(peers[name], role=rng.choice(ROLES))
                case _:
                    peers[name], conns[name] = peer(name, step), f"{name}#{step}"
            orders = sender.next(list(peers.values()), term, list(conns.values()))
            for conn, order in orders.items():
                if conn in known and not is_term:
                    assert len(order.peers) <= 1 >= len(order.gone), "expected only changes"
                known[conn] = receivers[conn].merged(order).peers
            for conn in conns.values():
                assert {each.name: each for each in known[conn]} == peers, (seed, step)
            if before == peers and not is_term:
                assert all(conn.endswith(f"#{step}") for conn in orders), "the others must get nothing"


def test_a_connection_that_missed_a_change_is_told_all() -> None:
    """Covers an instance that was not in the list for a while."""
    sender, receiver = PeersSender(), PeersReceiver()
    one, other = peer("worker-0", 1), peer("worker-1", 1)
    receiver.merged(sender.next([one], 0, ["a", "b"])["a"])
    assert set(sender.next([one, other], 0, ["b"])) == {"b"}
    orders = sender.next([other], 0, ["a", "b"])
    assert {conn: order.number for conn, order in orders.items()} == {"a": 1, "b": 3}
    assert receiver.merged(orders["a"]).peers == [other]


@pytest.mark.parametrize("number", [0, 2, 4, 5])
def test_a_lost_delta_is_noticed(number: int) -> None:
    """A delta out of order changes nothing; a snapshot is accepted at any time."""
    receiver, links = PeersReceiver(), LinkReceiver()
    one, other = peer("worker-0", 1), peer("worker-1", 1)
    for at in (1, 2):
        receiver.merged(wire.Peers([one], 3, at))
        links.merged(wire.Load(links={"a": PHASES[at]}, links_number=at))
    with pytest.raises(DeltaLost):
        receiver.merged(wire.Peers([other], 3, number))
    if number:  # an empty delta
        with pytest.raises(DeltaLost):
            links.merged(wire.Load(links={"b": PHASES[0]}, links_number=number))
    assert links.merged(wire.Load()).links == {"a": PHASES[2]}
    with pytest.raises(DeltaLost, match="the first of term 4"):
        receiver.merged(wire.Peers([other], 4, 3))
    assert receiver.merged(wire.Peers([other], 3, 3)).peers == [one, other]
    assert receiver.merged(wire.Peers([other], 4)).peers == [other]


def test_an_order_that_a_fence_refuses_leaves_nothing_behind() -> None:
    """With two owners, the later one's list replaces the first's, which sends a snapshot when it owns again."""
    fence, receivers = Fence(), (PeersReceiver(), PeersReceiver())
    first, second = PeersSender(), PeersSender()
    peers = [peer(f"worker-{at}", 1) for at in range(4)]
    known: list[wire.PeerInfo] = []
    for who, sender, term, named, holds in (
        (0, first, 1, peers[:2], True),
        (1, second, 2, peers[1:3], True),
        (0, first, 1, peers[:3], False),
        (1, second, 2, peers[1:4], True),
        (0, first, 3, peers, True),
    ):
        (order,) = sender.next(named, term, ["c"]).values()
        assert fence.admits(order.term) == holds
        if holds:
            known = receivers[who].merged(order).peers
            assert known == named
    assert known == peers
