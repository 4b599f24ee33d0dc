"""Transports move exactly the named pieces, notice damage, prove themselves before use, and end with their peer."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.kinds import DeviceKind
from pd_cluster.errors import LinkError, TransferFailed, called
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.numerics import Numerics
from pd_cluster.settings.config import Credentials, WorkerConfig
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.settings.processes import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.base import Checksum, Ends, KVReceiver, KVSender, LinkContext, Peer, PostKey, Prepared
from pd_cluster.transport.dist import DistSender
from pd_cluster.transport.events import Arrived, Drained, Landed, LandFault, LinkEvent, LinkFailed
from pd_cluster.transport.factory import Transports
from pd_cluster.transport.guard import LinkKey, Opener, Sealer
from pd_cluster.transport.local import LocalReceiver
from pd_cluster.transport.one_sided import OneSidedSender, PoolAddress
from pd_cluster.transport.receiving import Probe, ReceiveThread
from pd_cluster.transport.sending import SendThread
from pd_cluster.transport.shm import PoolServer, ShmReceiver
from pd_cluster.transport.table import BY_NAME, TABLE
from pd_cluster.transport.unix import UnixServer
from pd_cluster.types import TokenOutput
from tests.support.fake_device import FakeModule, MemfdMemory, content, install, put_on
from tests.support.nixl import needs_nixl

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
NUM_BLOCKS = 12
WAIT_S = 60.0
TOKEN = TokenOutput("r", 0, 0, 0, 5)
CHECKSUM = Checksum(seed=77)
KEY = LinkKey.derive(b"secret", "link", "p", "d")
NAMES: tuple[wire.TransportName, ...] = tuple(each.name for each in TABLE if "cpu" in each.pools and not each.package)
CHECKED = (*NAMES, "cuda dist", "npu dist")
READING = ("local", "shm", "cuda local", "cuda ipc", "npu local", "npu ipc")
# On fake devices: tests/support/fake_device.py.
WAYS = (*CHECKED, "cuda local", "cuda ipc", "cuda nccl", "npu local", "npu ipc", "npu hccl")
# An agent starts in a second.
WITH_NIXL = (*WAYS, pytest.param("nixl", marks=[pytest.mark.slow, needs_nixl]))


def random_pool(seed: int, layout: KVLayout = LAYOUT) -> KVPool:
    pool = KVPool(layout, NUM_BLOCKS)
    numbers = pool.memory.parts[0][:NUM_BLOCKS]
    numbers.copy_(torch.randn(numbers.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


Sender = TypeVar("Sender", bound=KVSender)
Receiver = TypeVar("Receiver", bound=KVReceiver)


def connected(
    make_sender: Callable[[PostKey], Sender], make_receiver: Callable[[wire.TransportOffer, PostKey], Receiver]
) -> tuple[Sender, Receiver]:
    """Makes two ends that send their keys to each other."""
    ends: list[KVSender | KVReceiver] = []

    def post_to(other: int) -> PostKey:
        def post(key: str, value: bytes) -> None:
            meeting = ends[other].meeting
            assert meeting is not None
            meeting.put(key, value)

        return post

    sender = make_sender(post_to(1))
    ends.append(sender)
    receiver = make_receiver(sender.offer(), post_to(0))
    ends.append(receiver)
    return sender, receiver


def ends_of(name: wire.TransportName, pool: KVPool) -> Ends:
    """Returns the row of the table for a worker with this pool."""
    return BY_NAME[name].ends(LinkContext(pool, MemfdMemory(), False, "127.0.0.1", WAIT_S, WAIT_S))


class Pair:
    """Both ends of one open transport, in one process."""

    def __init__(
        self,
        name: wire.TransportName,
        source: KVLayout = LAYOUT,
        checksum: Checksum = CHECKSUM,
        kind: DeviceKind = "cpu",
        into: KVLayout = LAYOUT,
        kinds: tuple[DeviceKind, DeviceKind] | None = None,
    ) -> None:
        """`kind`: of both devices; `kinds`: P's and D's."""
        self.source, self.target = random_pool(1, source), random_pool(2, into)
        for pool, of, at in zip((self.source, self.target), kinds or (kind, kind), (1, 0), strict=True):
            if of != "cpu":
                put_on(pool, at if name in ("nccl", "hccl") else 0, of)
        self.ends = ends_of(name, self.source), ends_of(name, self.target)
        self.sender, self.receiver = connected(
            lambda post: self.ends[0].sender(checksum, post),
            lambda offer, post: self.ends[1].receiver(Peer(offer, source, NUM_BLOCKS), checksum, post),
        )
        opening = threading.Thread(target=lambda: self.sender.open(into))
        opening.start()
        self.receiver.open()
        opening.join(WAIT_S)
        self._sequence = 0

    def move(self, piece: wire.KVPiece, into: list[int] | None, damage: int = 0, nbytes: int = 0) -> None:
        prepared = self.sender.prepare(piece)
        chunk = wire.KVChunk("t", 0, piece, nbytes or prepared.nbytes, prepared.checksum ^ damage)
        sending = threading.Thread(target=self.sender.send, args=(self._sequence, prepared))
        sending.start()
        try:
            self.receiver.receive(self._sequence, chunk, into)
            self.receiver.copies.settle()
        finally:
            sending.join(WAIT_S)
            self._sequence += 1

    def move_after(self, sequence: int, piece: wire.KVPiece, into: list[int]) -> None:
        self._sequence = sequence
        self.move(piece, into)

    @property
    def server(self) -> UnixServer | None:
        """The server of P's pool, if its transport has one; it lives as long as P's process."""
        server: UnixServer | None = getattr(self.ends[0], "_server", None)
        return server

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        if self.server is not None:
            self.server.close()


def blocks(ids: list[int], first_layer: int = 0, num_layers: int = 2) -> wire.KVPiece:
    return wire.KVPiece(0, len(ids) * LAYOUT.block_size, first_layer, num_layers, ids)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Two devices of one kind, which do nothing before they are waited for."""
    return install(monkeypatch)


def make_pair(way: str, request: pytest.FixtureRequest, source: KVLayout = LAYOUT, into: KVLayout = LAYOUT) -> Pair:
    kind, _, name = way.rpartition(" ")
    if kind:
        request.getfixturevalue("gpu")
    return Pair(name, source, kind=kind or "cpu", into=into)  # type: ignore[arg-type]


@pytest.fixture(params=WITH_NIXL)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = make_pair(request.param, request)
    yield made
    made.close()


@pytest.fixture(params=CHECKED)
def checked_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Makes a pair whose payloads have checksums."""
    made = make_pair(request.param, request)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(6))
def test_named_blocks_move_and_no_others(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, NUM_BLOCKS)
    source, into = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
    first, stop = [(0, 2), (0, 1), (1, 2)][seed % 3]
    expected = content(pair.target).clone()
    expected[into, first:stop] = content(pair.source)[source, first:stop]
    pair.move(blocks(source, first, stop - first), into)
    assert torch.equal(content(pair.target), expected)


@pytest.mark.parametrize("way", WITH_NIXL)
@pytest.mark.parametrize("change", [{"block_size": 8}, {"dtype": "bfloat16"}])
def test_pools_may_differ(way: str, change: dict[str, object], request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request, dataclasses.replace(LAYOUT, **change))  # type: ignore[arg-type]
    size = pair.source.layout.block_size
    pair.move(wire.KVPiece(4, 8, 0, 2, [3, 7]), [1, 5])
    for position in range(4, 12):
        at = position - 4 // size * size
        sent = content(pair.source)[[3, 7][at // size], :, :, at % size]
        found = content(pair.target)[[1, 5][(position - 4) // 4], :, :, position % 4]
        assert torch.equal(found, sent.float())
    pair.close()


def test_several_payloads_under_way_arrive_in_order(pair: Pair) -> None:
    """Announced ahead of their turn; the receiver takes them in as it has room."""
    pieces = [blocks([at]) for at in range(8)]
    prepared = [pair.sender.prepare(piece) for piece in pieces]

    def send() -> None:
        for at, each in enumerate(prepared):
            pair.sender.send(at, each)

    sending = threading.Thread(target=send)
    sending.start()
    chunks = [wire.KVChunk("t", 0, p, e.nbytes, e.checksum) for p, e in zip(pieces, prepared, strict=True)]
    for at, chunk in enumerate(chunks):
        pair.receiver.expect(at, chunk)
    for at, chunk in enumerate(chunks):
        pair.receiver.receive(at, chunk, [7 - at])
    pair.receiver.copies.settle()
    sending.join(WAIT_S)
    assert torch.equal(content(pair.target)[:8], content(pair.source)[:8].flip(0))


def test_a_wrong_checksum_is_noticed_and_the_link_lives(checked_pair: Pair) -> None:
    pair = checked_pair
    with pytest.raises(TransferFailed, match="checksum"):
        pair.move(blocks([1, 2]), [3, 4], damage=1)
    pair.move(blocks([1, 2]), [3, 4])
    assert torch.equal(content(pair.target)[[3, 4]], content(pair.source)[[1, 2]])


@pytest.mark.parametrize("name", NAMES)
def test_without_checksums_nothing_is_computed(name: wire.TransportName) -> None:
    pair = Pair(name, checksum=Checksum(is_on=False))
    assert pair.sender.prepare(blocks([1, 2])).checksum == 0
    pair.move(blocks([1, 2]), [3, 4])
    assert torch.equal(content(pair.target)[[3, 4]], content(pair.source)[[1, 2]])
    pair.close()


def test_an_unwanted_payload_is_taken_off_and_dropped(pair: Pair) -> None:
    before = content(pair.target).clone()
    pair.move(blocks([1, 2]), None)
    assert torch.equal(content(pair.target), before)
    pair.move(blocks([5]), [6])
    assert torch.equal(content(pair.target)[6], content(pair.source)[5])


@pytest.mark.parametrize("way", READING)
def test_a_block_outside_the_pool_is_refused(way: str, request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request)
    for block in (-1, NUM_BLOCKS, NUM_BLOCKS + 2):
        with pytest.raises(TransferFailed, match="outside"):
            pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([block]), LAYOUT.block_nbytes, 0), [0])
    pair.close()


@pytest.mark.parametrize("way", READING)
def test_a_length_that_does_not_fit_is_refused(way: str, request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request)
    with pytest.raises(TransferFailed, match="announces"):
        pair.move(blocks([1]), [1], nbytes=LAYOUT.block_nbytes + 1)
    pair.close()


@pytest.mark.parametrize("nbytes", [-1, 1 << 40])
@pytest.mark.parametrize("way", ["dist", "cuda dist", "cuda nccl", "npu hccl"])
def test_dist_refuses_a_length_that_no_payload_has(way: str, nbytes: int, request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request)
    with pytest.raises(LinkError, match="announces"):
        pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), nbytes, 0), [1])
    pair.close()


def test_shm_is_read_only_for_the_peer() -> None:
    """A decode process cannot write a prefill process's pool, whatever it does with its mapping."""
    server = PoolServer(random_pool(1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(WAIT_S)
        peer.connect(f"\0{server.name}")
        _, (fd,), _, _ = socket.recv_fds(peer, 2, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    server.close()


def test_shm_is_gone_with_its_server() -> None:
    server = PoolServer(random_pool(1))
    offer = PoolAddress(server.name).offer("shm")
    server.close()
    with pytest.raises(LinkError, match="cannot be reached"):
        ShmReceiver(offer, random_pool(2), LAYOUT, NUM_BLOCKS, CHECKSUM, WAIT_S).open()


def test_shm_refuses_a_pool_of_another_size() -> None:
    server = PoolServer(random_pool(1))
    offer = PoolAddress(server.name).offer("shm")
    with pytest.raises(LinkError, match="bytes"):
        ShmReceiver(offer, random_pool(2), LAYOUT, NUM_BLOCKS + 1, CHECKSUM, WAIT_S).open()
    server.close()


def test_dist_gives_up_when_nobody_joins() -> None:
    sender = DistSender(random_pool(1), CHECKSUM, False, "127.0.0.1", 0.3, 0.3, lambda key, value: None)
    with pytest.raises(LinkError) as caught:
        sender.open(LAYOUT)
    assert caught.value.retry


def test_dist_ends_with_its_peer() -> None:
    pair = Pair("dist")
    pair.sender.close()
    with pytest.raises(LinkError):
        pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), LAYOUT.block_nbytes, 0), [1])


# ---- both threads of a link


def make_config(transport: str, secret: bytes = b"s", connect_timeout_s: float = 5.0) -> WorkerConfig:
    return WorkerConfig(
        name="prefill-0",
        role="prefill",
        server_ip="127.0.0.1",
        bind_address="127.0.0.1",
        device_ids=["0"],
        epoch=1,
        credentials=Credentials(secret),
        num_threads=1,
        kv_transport=transport,  # type: ignore[arg-type]
        kv_port_range=PortRange(),
        engine=EngineConfig(model="m"),
        timeouts=Timeouts(connect_timeout_s=connect_timeout_s),
    )


class Link:
    """A link's two threads as two workers would build them, connected; their reports are collected.

    `tamper` sees every frame on its way and returns those that arrive.
    """

    def __init__(
        self,
        transport: str = "shm",
        tamper: Callable[[wire.KVFrame], list[wire.KVFrame]] = lambda frame: [frame],
        probe_seed: int | None = None,
        devices: tuple[int | None, int | None] = (None, None),
        kind: DeviceKind = "cuda",
        connect_timeout_s: float = 5.0,
    ) -> None:
        """`devices`: those of that kind that P's and D's pools are on."""
        self.source, self.target = random_pool(1), random_pool(2)
        for pool, index in zip((self.source, self.target), devices, strict=True):
            if index is not None:
                put_on(pool, index, kind)
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
        self._tamper = tamper
        config = make_config(transport, connect_timeout_s=connect_timeout_s)
        memory = MemfdMemory()
        p, d = Transports(config, self.source, memory), Transports(config, self.target, memory)
        self._keep = (p, d)
        self.send = p.send_thread("c", KEY, self._to_receiver, self.events.put)
        seed = self.source.probe_seed if probe_seed is None else probe_seed
        layout = LAYOUT.to_info()
        lane = wire.LaneOffer(offers=self.send.offers, probe_seed=seed)
        opened = wire.LinkOpen("link", "m", Numerics(), layout, NUM_BLOCKS, wire.KVOptions(), [lane])
        self._ready = threading.Event()
        self.receive = d.receive_thread("c", opened, KEY, self._to_sender, self._report)
        self._ready.set()
        self.receive.start()

    def _report(self, event: LinkEvent) -> None:
        """Keeps what ends a transfer or the link; tests/unit/test_landing.py has the rest."""
        if not isinstance(event, Arrived):
            self.events.put(event)

    def _to_sender(self, body: wire.Body) -> None:
        if isinstance(body, wire.LinkAnswer):
            self.send.open(body.transport, LAYOUT, KVLayout.from_info(body.layout))
        if isinstance(body, wire.LinkValue):
            self.send.meet(body)
            return
        self.answers.put(body)

    def _to_receiver(self, body: wire.Body) -> None:
        assert self._ready.wait(WAIT_S)
        if isinstance(body, wire.LinkValue):
            self.receive.meet(body)
            return
        assert isinstance(body, wire.KVFrame)
        for frame in self._tamper(body):
            self.receive.put(frame)

    def await_ready(self) -> wire.LinkReady:
        while not isinstance(answer := self.answers.get(timeout=WAIT_S), wire.LinkReady):
            assert isinstance(answer, wire.LinkAnswer), answer
        return answer

    def transfer(self, source: list[int], into: list[int], transfer_id: str = "t") -> None:
        """In two chunks, the first of them layer by layer."""
        num_tokens = len(source) * LAYOUT.block_size
        self.receive.begin(transfer_id, into, 0, num_tokens)
        half = len(source) // 2
        pieces = [blocks(source[:half], 0, 1), blocks(source[:half], 1, 1)]
        pieces.append(wire.KVPiece(half * 4, num_tokens - half * 4, 0, 2, source[half:]))
        for index, piece in enumerate(pieces):
            self.send.ship(transfer_id, index, piece)
        self.send.ship_end(wire.KVEnd(transfer_id, len(pieces), num_tokens, [TOKEN]))

    def close(self) -> None:
        self.send.close()
        self.receive.close()
        for each in (self.send, self.receive):
            each._thread.join(WAIT_S)  # it still uses the device


def test_no_transport_in_common_is_refused_with_both_sides_names() -> None:
    layout = LAYOUT.to_info()
    offers = [wire.TransportOffer(transport=name, data=b"") for name in ("nccl", "dist")]
    lane = wire.LaneOffer(offers=offers, probe_seed=1)
    opened = wire.LinkOpen("link", "m", Numerics(), layout, NUM_BLOCKS, wire.KVOptions(), [lane])
    answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
    receive = Transports(make_config("shm"), random_pool(2)).receive_thread("c", opened, KEY, answers.put, print)
    receive.start()
    refused = answers.get(timeout=WAIT_S)
    receive.close()
    assert isinstance(refused, wire.LinkRefused)
    choice = f"{called('kv_transport')} shm"
    assert refused.reason == f"no transport in common: the other offers nccl, dist; {choice} here allows shm"


@pytest.mark.parametrize(("transport", "chosen"), [("auto", "local"), ("shm", "shm"), ("dist", "dist")])
def test_a_link_is_proven_and_lands_transfers(transport: str, chosen: str) -> None:
    link = Link(transport)
    assert link.await_ready().transport == chosen
    link.transfer([1, 2, 3], [7, 8, 9])
    assert link.events.get(timeout=WAIT_S) == Landed("t", [TOKEN], 3 * LAYOUT.block_nbytes)
    assert torch.equal(link.target.data[[7, 8, 9]], link.source.data[[1, 2, 3]])
    link.send.probe()  # keepalive: the link lives
    link.transfer([4, 5], [0, 1], "t2")
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    assert link.receive.num_dropped == 0
    link.close()


@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_a_pool_with_another_content_is_not_trusted(transport: str) -> None:
    """D seems to read other memory than P means."""
    link = Link(transport, probe_seed=123)
    assert isinstance(link.answers.get(timeout=WAIT_S), wire.LinkAnswer)
    refused = link.answers.get(timeout=WAIT_S)
    assert isinstance(refused, wire.LinkRefused)
    assert "another content" in refused.reason
    assert refused.retry
    link.close()


def test_the_next_transport_is_tried_when_the_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: local is broken here, so shared memory serves."""

    def nothing(self: LocalReceiver, sequence: int, chunk: wire.KVChunk, into: list[int] | None) -> None: ...

    monkeypatch.setattr(LocalReceiver, "receive", nothing)
    link = Link("auto")
    assert link.await_ready().transport == "shm"
    link.transfer([1, 2, 3], [7, 8, 9])
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    link.close()


def test_what_lands_leaves_the_own_probe_alone() -> None:
    """The instance may become a prefill instance, and then proves its links with it."""
    link = Link("shm")
    before = link.target.data[link.target.probe_block].clone()
    link.await_ready()
    assert torch.equal(link.target.data[link.target.landing_probe_block], link.source.data[link.source.probe_block])
    assert torch.equal(link.target.data[link.target.probe_block], before)
    link.close()


def test_a_link_without_a_probe_is_refused() -> None:
    link = Link("shm", tamper=lambda frame: [], connect_timeout_s=1.5)
    assert isinstance(link.answers.get(timeout=WAIT_S), wire.LinkAnswer)
    refused = link.answers.get(timeout=WAIT_S)
    assert isinstance(refused, wire.LinkRefused)
    assert "no probe came within 1.5 s" in refused.reason
    link.close()


def test_a_keepalive_that_fails_ends_the_link() -> None:
    link = Link("shm")
    link.await_ready()
    link.source.data[link.source.probe_block] += 1
    link.send.probe()
    failed = link.events.get(timeout=WAIT_S)
    assert isinstance(failed, LinkFailed)
    assert "another content" in failed.reason
    link.close()


def test_doubled_and_foreign_frames_are_dropped_and_counted() -> None:
    stranger = Sealer(LinkKey.derive(b"other", "link", "p", "d"))

    def tamper(frame: wire.KVFrame) -> list[wire.KVFrame]:
        return [frame, frame, stranger.seal(wire.KVEnd("t", 0, 0, [TOKEN]))]

    link = Link("shm", tamper)
    link.await_ready()
    link.transfer([1, 2, 3], [7, 8, 9])
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    assert link.receive.num_dropped >= 8
    link.close()


def test_a_lost_frame_ends_the_link_and_drains_are_still_acknowledged() -> None:
    link = Link("shm", tamper=lambda frame: [frame] if frame.sequence != 2 else [])
    link.await_ready()
    link.transfer([1, 2, 3], [7, 8, 9])
    failed = link.events.get(timeout=WAIT_S)
    assert isinstance(failed, LinkFailed)
    assert "came when 2 was next" in failed.reason
    link.receive.forget("t")
    assert link.events.get(timeout=WAIT_S) == Drained("t")
    link.close()


def test_damage_in_the_payload_ends_the_transfer_only() -> None:
    link = Link("shm")
    link.await_ready()
    prepare = OneSidedSender.prepare

    def damaged(self: OneSidedSender, piece: wire.KVPiece) -> Prepared:
        prepared = prepare(self, piece)
        return dataclasses.replace(prepared, checksum=prepared.checksum ^ 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneSidedSender, "prepare", damaged)
        link.transfer([1, 2], [7, 8])
        assert link.events.get(timeout=WAIT_S) == LandFault("t", "checksum of a KV chunk is wrong")
    link.transfer([1, 2], [7, 8], "t2")
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    link.close()


def test_a_link_whose_transports_all_fail_is_refused() -> None:
    answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()

    class Broken(LocalReceiver):
        def open(self) -> None:
            raise LinkError("no way", retry=True)

    target = random_pool(2)
    receiver = Broken(PoolAddress("").offer("local"), target, LAYOUT, CHECKSUM)
    thread = ReceiveThread(
        "c", "link", [receiver], Probe(target, LAYOUT, 0), Opener(KEY), answers.put, lambda event: None, WAIT_S
    )
    thread.start()
    assert isinstance(answers.get(timeout=WAIT_S), wire.LinkAnswer)
    assert answers.get(timeout=WAIT_S) == wire.LinkRefused("link", "local: no way", True)
    thread.close()


def test_a_transport_that_was_not_offered_fails_the_link() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = SendThread("c", [], Sealer(KEY), 0, lambda body: None, events.put)
    thread.open("dist", LAYOUT, LAYOUT)
    assert events.get(timeout=WAIT_S) == LinkFailed("c", "the decode instance chose dist, which was not offered")


def test_a_thread_that_meets_a_surprise_reports_it_and_still_acknowledges_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link("local")
    link.await_ready()

    def surprise(self: LocalReceiver, sequence: int, chunk: wire.KVChunk, into: list[int] | None) -> None:
        raise MemoryError("no staging buffer")

    monkeypatch.setattr(LocalReceiver, "receive", surprise)
    link.transfer([1, 2], [7, 8])
    failed = link.events.get(timeout=WAIT_S)
    assert isinstance(failed, LinkFailed)
    assert "no staging buffer" in failed.reason
    link.receive.forget("t")
    assert link.events.get(timeout=WAIT_S) == Drained("t")
    link.close()


@pytest.mark.parametrize(
    ("ids", "first_layer", "num_layers", "is_in_place"),
    [([3, 4, 5], 0, 2, True), ([3, 5], 0, 2, False), ([4, 3], 0, 2, False), ([3, 4], 1, 1, False), ([3], 1, 1, True)],
)
def test_a_piece_is_sent_from_the_pool_itself_where_it_is_contiguous(
    ids: list[int], first_layer: int, num_layers: int, is_in_place: bool
) -> None:
    pool = random_pool(5)
    piece = wire.KVPiece(0, 4 * len(ids), first_layer, num_layers, ids)
    view = pool.memory.view_of(piece)
    assert (view is not None) == is_in_place
    if view is not None:
        assert torch.equal(view, pool.memory.gather(piece))
        assert view.untyped_storage().data_ptr() == pool.memory.parts[0].untyped_storage().data_ptr()
