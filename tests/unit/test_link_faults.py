"""A peer's faults affect only its link: other links open and stay up, threads report, drains are acknowledged."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from pd_cluster import wire
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.in_lanes import InLanes
from pd_cluster.engine.handover.links.in_links import InLinks
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint, LocalLanes, PeerProgress
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.dist import NUM_UNDER_WAY, DistReceiver, DistSender
from pd_cluster.transport.in_process import LocalReceiver
from pd_cluster.transport.link_events import Drained, Landed
from pd_cluster.transport.link_factory import Transports
from pd_cluster.transport.link_frames import LinkKey, Opener, Sealer
from pd_cluster.transport.one_sided import PoolAddress
from pd_cluster.transport.receive_thread import Incoming, Probe, ReceiveThread
from pd_cluster.transport.shm import PoolServer, ShmReceiver
from pd_cluster.transport.transport_interface import PostKey
from tests.support.mail import RecordedMail
from tests.support.transports import (
    CHECKSUM,
    KEY,
    LAYOUT,
    NUM_BLOCKS,
    TOKEN,
    WAIT_S,
    Link,
    Pair,
    blocks,
    connected,
    make_config,
    peer_of,
    place_of,
    random_pool,
)

OPENED = wire.LinkOpen(
    "l", "m", Numerics(), [LAYOUT.to_info()], [NUM_BLOCKS], wire.KVOptions(), [wire.LaneOffer(offers=[], probe_seed=0)]
)


def make_sender(connect_s: float, post: PostKey = lambda key, value: None) -> DistSender:
    return DistSender(place_of(random_pool(1), connect_s), CHECKSUM, post)


def test_a_peer_that_does_not_join_keeps_no_other_link_waiting() -> None:
    lonely = [make_sender(10 * WAIT_S) for _ in range(2)]

    def wait_in_vain(sender: DistSender) -> None:
        with contextlib.suppress(LinkError):
            sender.open(LAYOUT)

    waiting = [threading.Thread(target=wait_in_vain, args=(sender,), daemon=True) for sender in lonely]
    for thread in waiting:
        thread.start()
    pair = Pair("dist")  # within its own shorter timeout
    pair.move(blocks([1]), [2])
    assert all(thread.is_alive() for thread in waiting), "the pair must open while the others wait"
    pair.close()


def test_a_probe_that_is_announced_and_does_not_come_stops_no_other_probe() -> None:
    """A link waits for its announced probe without the lock that all links' probes share."""
    target, healthy, config = random_pool(2), random_pool(3), make_config("dist")
    answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()

    def to_receiver(body: wire.Body) -> None:
        if isinstance(body, wire.LinkValue):
            stalled.meet(body)

    def to_sender(body: wire.Body) -> None:
        if isinstance(body, wire.LinkValue):
            send.meet(body)
        else:
            answers.put(body)

    send = Transports(config, [random_pool(1)]).send_thread("a", KEY, to_receiver, lambda event: None)
    opened = msgspec.structs.replace(OPENED, link_id="a", lanes=[wire.LaneOffer(offers=send.offers, probe_seed=1)])
    stalled = Transports(config, [target]).receive_thread("a", opened, KEY, to_sender, lambda event: None)
    stalled.start()
    assert isinstance(answers.get(timeout=WAIT_S), wire.LinkAnswer)
    joined = threading.Thread(target=send.senders["dist"].open, args=(LAYOUT,))
    joined.start()
    joined.join(WAIT_S)
    chunk = wire.KVChunk("", 0, wire.KVPiece(0, 4, 0, 2, [NUM_BLOCKS + 1]), LAYOUT.block_nbytes, 0)
    stalled.put(Sealer(KEY).seal(wire.KVProbe("dist", chunk)))
    receiver = LocalReceiver(place_of(target), peer_of(PoolAddress("").offer("local")), CHECKSUM)
    receiver.source = lambda: healthy.memory  # type: ignore[method-assign]
    receiver.open()
    assert Probe(target, LAYOUT, healthy.probe_seed).problem(receiver, 0, chunk, 1.0) == ""
    refused = answers.get(timeout=WAIT_S)
    assert isinstance(refused, wire.LinkRefused), "the stalled link must fail within the connect timeout"
    stalled.close()


def test_a_payload_that_does_not_come_ends_the_link_in_time() -> None:
    pool = random_pool(2)
    sender, receiver = connected(
        lambda post: make_sender(WAIT_S, post),
        lambda offer, post: DistReceiver(place_of(pool, transfer_s=0.3), peer_of(offer), CHECKSUM, post),
    )
    opening = threading.Thread(target=sender.open, args=(LAYOUT,))
    opening.start()
    receiver.open()
    opening.join(WAIT_S)
    with pytest.raises(LinkError, match="receiving KV cache failed"):
        receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), LAYOUT.block_nbytes, 0), [1])


def test_transports_that_were_not_chosen_are_closed() -> None:
    link = Link("auto")
    assert {offer.transport for offer in link.send.offers} == {"local", "shm", "dist", "curve"}
    assert link.await_ready().transport == "local"
    link.send.settle()
    link.transfer([1, 2], [7, 8])
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)  # so the thread has finished its copies
    assert [offer.transport for offer in link.send.offers] == ["local"]
    link.close()


def test_only_so_many_payloads_are_under_way() -> None:
    class Works:
        """A group whose sends end when waited for."""

        def __init__(self) -> None:
            self.waiting: deque[int] = deque()
            self.most = 0

        def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Works:
            self.waiting.append(tag)
            self.most = max(self.most, len(self.waiting))
            return self

        def wait(self, timeout: object) -> None:
            self.waiting.popleft()

    pair = Pair("dist")
    assert isinstance(pair.sender, DistSender)
    works = pair.sender.group = Works()
    for at in range(3 * NUM_UNDER_WAY):
        pair.sender.send(at, pair.sender.prepare(blocks([1])))
    assert works.most == NUM_UNDER_WAY
    assert len(set(works.waiting)) == NUM_UNDER_WAY, "each send must have its own tag"
    pair.close()


def test_the_pools_server_outlives_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PoolServer(random_pool(1))
    listener, failures = server.listener, [0]

    class Failing:
        def accept(self) -> Any:
            if failures[0] < 2:
                failures[0] += 1
                raise OSError(24, "Too many open files")
            return listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    server.listener = Failing()  # type: ignore[assignment]
    for _ in range(3):  # the accept already in progress takes the first one
        offer = PoolAddress(server.name).offer("shm")
        ShmReceiver(place_of(random_pool(2)), peer_of(offer), CHECKSUM).open()
    assert failures == [2]
    server.close()


def test_a_pool_is_not_handed_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PoolServer(random_pool(1))
    offer = PoolAddress(server.name).offer("shm")
    receiver = ShmReceiver(place_of(random_pool(2)), peer_of(offer), CHECKSUM)
    uids = iter([os.getuid(), 12345])  # D's view of P, then P's view of D
    monkeypatch.setattr("pd_cluster.transport.unix_server.peer_uid", lambda peer: next(uids))
    with pytest.raises(LinkError, match="another user"):
        receiver.open()
    server.close()


# ---- the receiving thread


def test_what_came_before_a_missing_frame_still_counts() -> None:
    sealer, incoming = Sealer(KEY), Incoming(Opener(KEY))
    frames = [sealer.seal(wire.KVEnd(f"t{at}", 0, 0, [TOKEN])) for at in range(4)]
    for frame in (frames[0], frames[1], frames[3]):
        incoming.queue.put(frame)
    assert [incoming.next(None, WAIT_S)[0] for _ in range(2)] == [0, 1]  # type: ignore[index]
    with pytest.raises(LinkError, match="arrived, but 2 was expected"):
        incoming.next(None, WAIT_S)


def test_frames_that_are_dropped_buy_no_time() -> None:
    incoming, stranger = Incoming(Opener(KEY)), Sealer(LinkKey.derive(b"other", "link", "p", "d"))
    stop = threading.Event()

    def flood() -> None:
        while not stop.wait(0.001):
            incoming.queue.put(stranger.seal(wire.KVEnd("t", 0, 0, [TOKEN])))

    flooding = threading.Thread(target=flood)
    flooding.start()
    with pytest.raises(queue.Empty):
        incoming.next(None, 0.2)
    stop.set()
    flooding.join(WAIT_S)


class Post(RecordedMail):
    """Recorded mail that tests wait for, because links' threads send it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()

    def send(self, conn: str, body: wire.Body) -> None:
        self.queue.put(body)


class OneLane:
    """The part of a single-lane receiving end that InLinks uses, and its factory."""

    received_nbytes = num_dropped = 0

    def receive_end(self, *_: object) -> Any:
        return self

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return False

    def start(self) -> None: ...


def make_in_links(
    pool: KVPool, lanes: Any = None, down: Callable[[str, str], None] = lambda conn, reason: None
) -> tuple[InLinks, Post, queue.SimpleQueue[object], list[float]]:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    now = [0.0]
    endpoint = LocalEndpoint("d@1", b"s", "m", Numerics(), (LAYOUT,), (NUM_BLOCKS,), wire.KVOptions())
    post = Post()
    lanes = lanes or LocalLanes(endpoint, Transports(make_config("local"), [pool]), post.send)
    clock = lambda: now[0]  # noqa: E731
    context = HandoverContext(endpoint, cast(Any, post), lanes, events.put, Timeouts(), clock)
    users: Any = SimpleNamespace(on_link_down=down)
    links = InLinks(context, InLanes(context, PeerProgress(clock)), users)
    return links, post, events, now


def test_a_link_that_goes_down_acknowledges_drains_first() -> None:
    """Drains must be acknowledged before the thread ends, because the thread forgets transfers."""
    links, post, events, _ = make_in_links(random_pool(2), down=lambda conn, reason: links.table.forget(conn, "t"))
    links.on_open("c", "prefill-0@1", OPENED, is_announced=True)
    assert isinstance(post.queue.get(timeout=WAIT_S), wire.LinkRefused)
    links.on_down("c", "cut")
    assert events.get(timeout=WAIT_S) == Drained("t")


def test_a_peer_that_is_not_known_yet_may_come_again() -> None:
    links, post, _, _ = make_in_links(random_pool(2))
    links.on_open("c", "prefill-0@1", OPENED, is_announced=False)
    refused = post.queue.get(timeout=WAIT_S)
    assert isinstance(refused, wire.LinkRefused)
    assert (refused.retry, refused.reason) == (True, "the scheduler has not announced prefill-0@1 to d@1")
    assert not links.table.is_open("c")


def test_a_link_is_known_before_its_thread_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's probe may arrive as soon as the answer is sent, and must reach its link."""
    links, _, _, _ = make_in_links(random_pool(2))
    known: list[bool] = []
    monkeypatch.setattr(ReceiveThread, "start", lambda self: known.append(links.table.is_open("c")))
    links.on_open("c", "prefill-0@1", OPENED, is_announced=True)
    assert known == [True]


def test_what_lands_is_progress_of_its_sender() -> None:
    """A prefill step may outlast the lease as long as its layers keep arriving."""
    lane = OneLane()
    links, _, _, now = make_in_links(random_pool(2), lane)
    links.on_open("c", "prefill-0@1", OPENED, is_announced=True)
    links.table.progress_s("c")
    now[0] = 40.0
    lane.received_nbytes = 5
    assert links.table.progress_s("c") == 40.0
    now[0] = 80.0
    assert links.table.progress_s("c") == 40.0
