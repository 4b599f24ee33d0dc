"""Transports move exactly the named blocks, notice damage, and end with their peer."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from pd_cluster import wire
from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.layout import KVLayout, check_pair
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import KVReceiver, KVSender, runs
from pd_cluster.transport.dist import DistReceiver, DistSender, Store
from pd_cluster.transport.shm import PoolServer, ShmReceiver, ShmSender
from pd_cluster.transport.threads import (
    Drained,
    Landed,
    Lander,
    LandFault,
    LinkFailed,
    ReceiveThread,
    SendThread,
)
from pd_cluster.types import TokenOutput

LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=2, k_head_dim=8, v_head_dim=8, block_size=4, dtype="float32", tp_size=1, tp_rank=0
)
NUM_BLOCKS = 12
WAIT_S = 10.0
TOKEN = TokenOutput("r", 0, 0, 0, 5)


def random_pool(seed: int) -> KVPool:
    pool = KVPool(LAYOUT, NUM_BLOCKS)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


class Pair:
    """Both ends of one open link, in one process."""

    def __init__(self, name: str) -> None:
        self.source, self.target = random_pool(1), random_pool(2)
        self.sender: KVSender
        self.receiver: KVReceiver
        if name == "shm":
            self.server = PoolServer(self.source)
            self.sender = ShmSender(self.server, self.source)
            self.receiver = ShmReceiver(self.sender.offer(), self.target, NUM_BLOCKS, WAIT_S)
        else:
            self.sender = DistSender(Store("127.0.0.1", WAIT_S), self.source, "127.0.0.1", WAIT_S, WAIT_S)
            offer = self.sender.offer()
            self.receiver = DistReceiver(offer, self.target, "127.0.0.1", "127.0.0.1", WAIT_S, WAIT_S)
        opening = threading.Thread(target=self.sender.open)
        opening.start()
        self.receiver.open()
        opening.join(WAIT_S)

    def move(self, source: list[int], into: list[int] | None, damage: int = 0, checksum: bool = True) -> None:
        payload, digest = self.sender.payload(source, checksum)
        chunk = wire.KVChunk("t", 0, 0, source, len(source) * LAYOUT.block_nbytes, digest ^ damage)
        sending = threading.Thread(target=self.sender.send, args=(payload,))
        sending.start()
        try:
            self.receiver.receive(chunk, into)
        finally:
            sending.join(WAIT_S)


@pytest.fixture(params=["shm", "dist"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.sender.close()
    made.receiver.close()
    if request.param == "shm":
        made.server.close()


@pytest.mark.parametrize("seed", range(5))
def test_named_blocks_move_and_no_others(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, NUM_BLOCKS)
    source, into = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
    before = pair.target.data.clone()
    pair.move(source, into, checksum=seed % 2 == 0)
    assert torch.equal(pair.target.data[into], pair.source.data[source])
    others = [block for block in range(NUM_BLOCKS) if block not in into]
    assert torch.equal(pair.target.data[others], before[others])


def test_a_wrong_checksum_is_noticed_and_the_link_lives(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="checksum"):
        pair.move([1, 2], [3, 4], damage=1)
    pair.move([1, 2], [3, 4])
    assert torch.equal(pair.target.data[[3, 4]], pair.source.data[[1, 2]])


def test_an_unwanted_payload_is_taken_off_and_dropped(pair: Pair) -> None:
    before = pair.target.data.clone()
    pair.move([1, 2], None)
    assert torch.equal(pair.target.data, before)
    pair.move([5], [6])
    assert torch.equal(pair.target.data[6], pair.source.data[5])


def test_shm_refuses_a_block_outside_the_pool() -> None:
    pair = Pair("shm")
    for block in (-1, NUM_BLOCKS, NUM_BLOCKS + 5):
        with pytest.raises(TransferFailed, match="outside"):
            pair.receiver.receive(wire.KVChunk("t", 0, 0, [block], LAYOUT.block_nbytes, 0), [0])
    pair.server.close()


def test_shm_is_read_only_for_the_peer() -> None:
    """A decode process cannot write a prefill process's pool, whatever it does with its mapping."""
    pair = Pair("shm")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(WAIT_S)
        peer.connect(f"\0{pair.server.name}")
        _, (fd,), _, _ = socket.recv_fds(peer, 2, 1)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    pair.server.close()


def test_shm_is_gone_with_its_server() -> None:
    pool = random_pool(1)
    server = PoolServer(pool)
    offer = ShmSender(server, pool).offer()
    server.close()
    with pytest.raises(LinkError, match="cannot be reached"):
        ShmReceiver(offer, random_pool(2), NUM_BLOCKS, WAIT_S).open()


def test_shm_refuses_a_pool_of_another_size() -> None:
    pool = random_pool(1)
    server = PoolServer(pool)
    with pytest.raises(LinkError, match="bytes"):
        ShmReceiver(ShmSender(server, pool).offer(), random_pool(2), NUM_BLOCKS + 1, WAIT_S).open()
    server.close()


def test_dist_gives_up_when_nobody_joins() -> None:
    sender = DistSender(Store("127.0.0.1", 0.3), random_pool(1), "127.0.0.1", 0.3, 0.3)
    with pytest.raises(LinkError) as caught:
        sender.open()
    assert caught.value.retry


def test_dist_ends_with_its_peer() -> None:
    pair = Pair("dist")
    pair.sender.close()
    with pytest.raises(LinkError):
        pair.receiver.receive(wire.KVChunk("t", 0, 0, [1], LAYOUT.block_nbytes, 0), [1])


def test_dist_refuses_a_length_that_does_not_fit() -> None:
    pair = Pair("dist")
    with pytest.raises(LinkError, match="announces"):
        pair.receiver.receive(wire.KVChunk("t", 0, 0, [1], LAYOUT.block_nbytes + 1, 0), [1])


class Collected:
    """A link's two threads, connected; what they report is collected."""

    def __init__(self, pair: Pair) -> None:
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.receive = ReceiveThread("c", "link", [pair.receiver], self.answer, self.events.put)
        self.send = SendThread("c", [pair.sender], self.to_receiver, self.events.put, True, LAYOUT.block_nbytes)

    def answer(self, body: wire.Body) -> None:
        if isinstance(body, wire.LinkAnswer):
            self.send.open(body.transport)
        elif isinstance(body, wire.LinkReady):
            self.events.put(body)

    def to_receiver(self, body: wire.Body) -> None:
        assert isinstance(body, wire.KVChunk | wire.KVEnd)
        self.receive.put(body)

    def close(self) -> None:
        self.send.close()
        self.receive.close()


def test_the_threads_land_a_transfer_in_order() -> None:
    source, target = random_pool(1), random_pool(2)
    server = PoolServer(source)
    pair = Pair.__new__(Pair)
    pair.sender = ShmSender(server, source)
    pair.receiver = ShmReceiver(pair.sender.offer(), target, NUM_BLOCKS, WAIT_S)

    link: list[Collected] = []

    class Late(Collected):
        def answer(self, body: wire.Body) -> None:
            if isinstance(body, wire.LinkReady):
                self.events.put(body)

    link.append(Late(pair))
    assert isinstance(link[0].events.get(timeout=WAIT_S), wire.LinkReady)
    link[0].send.open("shm")
    link[0].receive.begin("t", [7, 8, 9])
    link[0].send.ship("t", 0, 0, [1, 2])
    link[0].send.ship("t", 1, 2, [3])
    link[0].send.ship_end(wire.KVEnd("t", 2, 11, [TOKEN]))
    landed = link[0].events.get(timeout=WAIT_S)
    assert landed == Landed("t", [TOKEN], 3 * LAYOUT.block_nbytes)
    assert torch.equal(target.data[[7, 8, 9]], source.data[[1, 2, 3]])
    link[0].close()
    server.close()


class NoTransport:
    name: wire.TransportName = "local"

    def open(self) -> None: ...

    def receive(self, chunk: wire.KVChunk, into: list[int] | None) -> None: ...

    def close(self) -> None: ...


def chunk(sequence: int, first: int, count: int = 1) -> wire.KVChunk:
    return wire.KVChunk("t", sequence, first, list(range(count)), 1, 0)


@pytest.mark.parametrize(
    "items",
    [
        [chunk(1, 0)],  # the first is missing
        [chunk(0, 0), chunk(0, 0)],  # twice
        [chunk(0, 1)],  # a gap
        [chunk(0, 0), chunk(1, 1, count=9)],  # more than was reserved
        [chunk(0, 0), wire.KVEnd("t", 1, 8, [TOKEN])],  # too little
        [chunk(0, 0, 2), wire.KVEnd("t", 2, 8, [TOKEN])],  # another count
        [chunk(0, 0, 2), wire.KVEnd("t", 1, 8, [])],  # no token
    ],
)
def test_the_lander_notices_what_is_out_of_order(items: list[wire.KVChunk | wire.KVEnd]) -> None:
    lander = Lander(NoTransport())
    lander.begin("t", [4, 5])
    events = [lander.land(item) for item in items]
    assert isinstance(events[-1], LandFault)
    assert lander.land(chunk(0, 0)) is None, "after a fault nothing of this transfer lands"


def test_a_link_whose_transports_all_fail_is_refused() -> None:
    answers: list[wire.Body] = []
    refused = threading.Event()

    class Broken(NoTransport):
        def open(self) -> None:
            raise LinkError("no way", retry=True)

    def post(body: wire.Body) -> None:
        answers.append(body)
        if isinstance(body, wire.LinkRefused):
            refused.set()

    thread = ReceiveThread("c", "link", [Broken()], post, lambda event: None)
    assert refused.wait(WAIT_S)
    assert answers[-1] == wire.LinkRefused("link", "local: no way", True)
    thread.close()


def test_a_sender_that_fails_reports_its_link() -> None:
    events: list[object] = []
    failed = threading.Event()

    class Broken:
        name: wire.TransportName = "local"

        def offer(self) -> wire.TransportOffer:
            return wire.TransportOffer(transport="local")

        def open(self) -> None:
            raise LinkError("no way")

        def payload(self, block_ids: list[int], checksum: bool) -> tuple[torch.Tensor | None, int]:
            return None, 0

        def send(self, payload: torch.Tensor | None) -> None: ...

        def close(self) -> None:
            failed.set()

    thread = SendThread("c", [Broken()], lambda body: None, events.append, True, 1)
    thread.open("local")
    assert failed.wait(WAIT_S)
    assert events == [LinkFailed("c", "no way")]


def test_runs() -> None:
    assert runs([3, 4, 5, 9]) == [(3, 3), (9, 1)]
    assert runs([]) == []
    assert runs([2, 1]) == [(2, 1), (1, 1)]


def with_changes(**changes: object) -> Callable[[], KVLayout]:
    return lambda: dataclasses.replace(LAYOUT, **changes)


@pytest.mark.parametrize(
    "change", [{"block_size": 8}, {"dtype": "float16"}, {"num_layers": 3}, {"num_kv_heads": 4}, {"tp_size": 2}]
)
def test_pairs_that_cannot_work_are_refused_by_name(change: dict[str, object]) -> None:
    check_pair(LAYOUT, LAYOUT)
    with pytest.raises(LinkError, match=next(iter(change))) as caught:
        check_pair(LAYOUT, with_changes(**change)())
    assert not caught.value.retry


def test_head_ranges_cover_all_heads() -> None:
    """Split while there are enough heads, replicated when there are more ranks."""

    def ranges(num_kv_heads: int, tp_size: int) -> list[tuple[int, int]]:
        layout = dataclasses.replace(LAYOUT, num_kv_heads=num_kv_heads, tp_size=tp_size)
        return [dataclasses.replace(layout, tp_rank=rank).head_range for rank in range(tp_size)]

    assert ranges(8, 2) == [(0, 4), (4, 8)]
    assert ranges(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert ranges(2, 2) == [(0, 1), (1, 2)]


def test_a_thread_that_meets_a_surprise_reports_it_and_still_acknowledges_drains() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Surprising(NoTransport):
        def receive(self, chunk: wire.KVChunk, into: list[int] | None) -> None:
            raise MemoryError("no staging buffer")

    thread = ReceiveThread("c", "link", [Surprising()], lambda body: None, events.put)
    thread.begin("t", [1])
    thread.put(chunk(0, 0))
    failed = events.get(timeout=WAIT_S)
    assert isinstance(failed, LinkFailed)
    assert "no staging buffer" in failed.reason
    thread.forget("t")
    assert events.get(timeout=WAIT_S) == Drained("t")
    thread.close()


def test_a_transport_that_was_not_offered_fails_the_link() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = SendThread("c", [], lambda body: None, events.put, True, 1)
    thread.open("dist")
    assert events.get(timeout=WAIT_S) == LinkFailed("c", "the decode instance chose dist, which was not offered")
