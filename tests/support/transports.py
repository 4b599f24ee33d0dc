"""Runs both ends of a transport, and both threads of a link, in one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from pd_cluster import wire
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.numerics import Numerics
from pd_cluster.settings.process_configs import Credentials, WorkerConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.device_memory import DeviceMemory
from pd_cluster.transport.link_events import Arrived, LinkEvent
from pd_cluster.transport.link_factory import Transports
from pd_cluster.transport.link_frames import LinkKey
from pd_cluster.transport.transport_interface import Checksum, Ends, KVReceiver, KVSender, LinkContext, Peer, PostKey
from pd_cluster.transport.transport_table import BY_NAME
from pd_cluster.transport.unix_server import UnixServer
from pd_cluster.types import TokenOutput
from tests.support.fake_device import MemfdMemory, put_on
from tests.support.worker_configs import worker_config

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
NUM_BLOCKS = 12
WAIT_S = 60.0
TOKEN = TokenOutput("r", 0, 0, 0, 5)
CHECKSUM = Checksum(seed=77)
KEY = LinkKey.derive(b"secret", "link", "p", "d")


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
    """Makes a sender and a receiver that send their keys to each other."""
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


def place_of(
    pool: KVPool, connect_s: float = WAIT_S, transfer_s: float = WAIT_S, memory: DeviceMemory | None = None
) -> LinkContext:
    return LinkContext(pool, memory or MemfdMemory(), False, "127.0.0.1", connect_s, transfer_s)


def peer_of(offer: wire.TransportOffer, num_blocks: int = NUM_BLOCKS) -> Peer:
    return Peer(offer, LAYOUT, num_blocks)


def ends_of(name: wire.TransportName, pool: KVPool) -> Ends:
    """Returns the transport's entry in the table, for a worker with this pool."""
    return BY_NAME[name].ends(place_of(pool))


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
        """`kind`: both devices' kind; `kinds`: P's and D's, if they differ."""
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

    @property
    def server(self) -> UnixServer | None:
        """Returns the server of P's pool, if its transport has one; it lasts as long as P's process."""
        server: UnixServer | None = getattr(self.ends[0], "_server", None)
        return server

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        if self.server is not None:
            self.server.close()


def blocks(ids: list[int], first_layer: int = 0, num_layers: int = 2) -> wire.KVPiece:
    return wire.KVPiece(0, len(ids) * LAYOUT.block_size, first_layer, num_layers, ids)


def make_config(transport: str, secret: bytes = b"s", connect_timeout_s: float = 5.0) -> WorkerConfig:
    timeouts = Timeouts(connect_timeout_s=connect_timeout_s)
    return worker_config(credentials=Credentials(secret), kv_transport=transport, timeouts=timeouts)


class Link:
    """A link's two threads, built and connected as by two workers; collects their reports.

    `tamper` receives every sent frame and returns the frames that arrive.
    """

    def __init__(
        self,
        transport: str = "shm",
        tamper: Callable[[wire.KVFrame], list[wire.KVFrame]] = lambda frame: [frame],
        probe_seed: int | None = None,
        devices: tuple[int | None, int | None] = (None, None),
        kind: DeviceKind = "cuda",
        connect_timeout_s: float = 5.0,
        pools: tuple[KVPool, KVPool] | None = None,
        before: tuple[KVPool, KVPool] | None = None,
    ) -> None:
        """`devices`: indices of the devices of P's and D's pools.

        `before`: pools of an earlier group of layers.
        """
        self.source, self.target = pools or (random_pool(1), random_pool(2))
        for pool, index in zip((self.source, self.target), devices, strict=True):
            if index is not None:
                put_on(pool, index, kind)
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
        self._tamper = tamper
        config = make_config(transport, connect_timeout_s=connect_timeout_s)
        memory = MemfdMemory()
        sides = zip(*([before] if before is not None else []), (self.source, self.target), strict=True)
        p, d = (Transports(config, side, memory) for side in sides)
        self.others = before or ()
        self._keep, group = (p, d), int(before is not None)
        self.send = p.send_thread("c", KEY, self._to_receiver, self.events.put, group=group)
        seed = self.source.probe_seed if probe_seed is None else probe_seed
        sources, rank = [*(before or ())[:1], self.source], self.source.layout.tp_rank
        lane = wire.LaneOffer(offers=self.send.offers, probe_seed=seed, source_rank=rank, group=group)
        layouts, counts = [each.layout.of_rank(0).to_info() for each in sources], [NUM_BLOCKS] * len(sources)
        opened = wire.LinkOpen("link", "m", Numerics(), layouts, counts, wire.KVOptions(), [lane])
        self._ready = threading.Event()
        self.receive = d.receive_thread("c", opened, KEY, self._to_sender, self._report)
        self._ready.set()
        self.receive.start()

    def _report(self, event: LinkEvent) -> None:
        """Keeps only reports that end a transfer or the link; tests/unit/test_landing.py checks the others."""
        if not isinstance(event, Arrived):
            self.events.put(event)

    def _to_sender(self, body: wire.Body) -> None:
        if isinstance(body, wire.LinkAnswer):
            self.send.open(body.transport, self.source.layout, KVLayout.from_info(body.layout))
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
        """Sends a transfer in two chunks, the first one layer by layer."""
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
            each.thread.join(WAIT_S)  # the thread still uses the device
