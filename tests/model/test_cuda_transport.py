"""Handover between two processes, each with a pool on a device; on one GPU if there is one.

The same tests run over host memory everywhere, so that the tests themselves are checked without a GPU. `-s` prints
figures; no test depends on time.
"""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.device import synchronize
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.numerics import Numerics
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LinkFailed
from pd_cluster.transport.link_factory import Transports
from tests.support.kv_exporter import (
    KEY,
    LAYOUT,
    NUM_BLOCKS,
    Fault,
    Frame,
    Offers,
    Open,
    Ship,
    Value,
    make_config,
    make_pool,
    sleep,
)

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
# (device kind, requested transport, chosen transport)
WAYS = [
    pytest.param(("cpu", "shm", "shm"), id="shm"),
    pytest.param(("cuda", "ipc", "ipc"), id="ipc", marks=needs_gpu),
    pytest.param(("cuda", "auto", "ipc"), id="auto", marks=needs_gpu),
    pytest.param(("cuda", "dist", "dist"), id="gloo from GPU", marks=needs_gpu),  # NCCL refuses one GPU for both
]
Ends = tuple[Callable[[wire.KVFrame], None], Callable[[wire.LinkValue], None]]


class Exporter:
    """P in a separate process. Passes frames to `put` and values to `meet`, after `connect` has set these."""

    def __init__(self, kind: str, choice: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_exporter", kind, choice],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.faults: list[str] = []
        self._offers: queue.SimpleQueue[Offers] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[Ends] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.offers = self._offers.get(timeout=WAIT_S)

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Offers | Fault | Frame | Value)
        ends: Ends | None = None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match decoder.decode(line):
                case Offers() as offers:
                    self._offers.put(offers)
                case Fault(what):
                    self.faults.append(what)
                case Frame(sequence, header, mac):
                    ends = ends or self._ends.get(timeout=WAIT_S)
                    ends[0](wire.KVFrame(sequence, header, mac))
                case Value(transport, key, value):
                    ends = ends or self._ends.get(timeout=WAIT_S)
                    ends[1](wire.LinkValue(transport, key, value))

    def connect(self, put: Callable[[wire.KVFrame], None], meet: Callable[[wire.LinkValue], None]) -> None:
        self._ends.put((put, meet))

    def tell(self, command: Open | Ship | Value) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command).decode() + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Lane:
    """D in this process, linked to an exporter."""

    def __init__(self, kind: str, choice: str, chosen: str, transfer_timeout_s: float = 30.0) -> None:
        self.exporter = Exporter(kind, choice)
        self.expected = make_pool("cpu", 1).data  # the content of P's pool
        self.pool = make_pool(kind, 2)
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
        offers = self.exporter.offers
        lane = wire.LaneOffer(offers=offers.offers, probe_seed=offers.probe_seed)
        opened = wire.LinkOpen("link", "m", Numerics(), [LAYOUT.to_info()], [NUM_BLOCKS], wire.KVOptions(), [lane])
        transports = Transports(make_config(choice, transfer_timeout_s), [self.pool])

        def post(body: wire.Body) -> None:
            if isinstance(body, wire.LinkValue):
                self.exporter.tell(Value(body.transport, body.key, body.value))
            else:
                answers.put(body)

        self.receive = transports.receive_thread("c", opened, KEY, post, self.events.put)
        self.exporter.connect(self.put, self.receive.meet)
        self.receive.start()
        while not isinstance(answer := answers.get(timeout=WAIT_S), wire.LinkReady):
            assert isinstance(answer, wire.LinkAnswer), answer
            self.exporter.tell(Open(answer.transport))
        assert answer.transport == chosen

    def put(self, frame: wire.KVFrame) -> None:
        self.receive.put(frame)

    def begin(self, transfer_id: str, into: list[int]) -> None:
        self.receive.begin(transfer_id, into, 0, len(into) * LAYOUT.block_size)

    def await_landed(self) -> Landed:
        while isinstance(event := self.events.get(timeout=WAIT_S), Arrived):
            pass
        assert isinstance(event, Landed), (event, self.exporter.faults)
        return event

    def close(self) -> None:
        self.receive.close()
        self.receive._thread.join(WAIT_S)
        self.exporter.close()


@pytest.fixture(params=WAYS, scope="module")
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    """Yields a shared lane, so each test uses its own transfer names."""
    made = Lane(*request.param)
    yield made
    made.close()


def same(pool: KVPool, into: list[int], expected: torch.Tensor) -> bool:
    return torch.equal(pool.data[into].cpu(), expected)


def test_blocks_arrive_bit_for_bit(lane: Lane) -> None:
    rng = random.Random(1)
    for at, (count, by_layer) in enumerate([(1, True), (2, False), (37, True), (200, False)]):
        ids, into = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
        lane.begin(f"exact{at}", into)
        lane.exporter.tell(Ship(f"exact{at}", ids, by_layer=by_layer))
        lane.await_landed()
        assert same(lane.pool, into, lane.expected[ids])


def test_blocks_that_are_written_late_arrive_as_written(lane: Lane) -> None:
    into = list(range(100, 164))
    lane.begin("written late", into)
    lane.exporter.tell(Ship("written late", list(range(64)), value=7.0))
    lane.await_landed()
    lane.expected[:64] = 7.0
    assert same(lane.pool, into, lane.expected[:64])


def test_blocks_whose_last_user_is_late_hold_what_has_landed(lane: Lane) -> None:
    into = list(range(64))
    sleep(lane.pool.device)
    lane.pool.data[:64].fill_(3.0)  # another request's earlier launch
    lane.begin("used late", into)
    lane.exporter.tell(Ship("used late", into))
    lane.await_landed()
    synchronize(lane.pool.device)
    assert same(lane.pool, into, lane.expected[:64])


def test_blocks_are_somebody_elses_after_the_drain(lane: Lane) -> None:
    into = list(range(NUM_BLOCKS))
    received_nbytes = lane.receive.received_nbytes
    lane.begin("drained", into)
    lane.exporter.tell(Ship("drained", into))
    while lane.receive.received_nbytes == received_nbytes:
        time.sleep(0.001)
    lane.receive.forget("drained")
    while not isinstance(event := lane.events.get(timeout=WAIT_S), Drained):
        assert isinstance(event, Arrived | Landed)
    lane.pool.data[into] = 3.0
    synchronize(lane.pool.device)
    assert same(lane.pool, into, torch.full_like(lane.expected, 3.0)[:NUM_BLOCKS])


@pytest.mark.alone
def test_the_death_of_the_exporter_ends_the_link_and_not_this_process(lane: Lane) -> None:
    """After kill -9 of the exporter while its blocks are read, nothing hangs and this device continues.

    This is the lane's last test.
    """
    into = list(range(NUM_BLOCKS))
    for at in range(20):
        lane.begin(f"t{at}", into)
        lane.exporter.tell(Ship(f"t{at}", into))
    lane.await_landed()
    lane.exporter.process.kill()
    lane.exporter.process.wait(WAIT_S)
    awaited = {f"t{at}" for at in range(20)}  # any of them may still be landing
    for name in sorted(awaited):
        lane.receive.forget(name)  # acknowledged whatever the link's state
    while awaited:
        event = lane.events.get(timeout=WAIT_S)
        assert isinstance(event, Arrived | Landed | LinkFailed | Drained), event
        if isinstance(event, Drained):
            awaited.discard(event.transfer_id)
    lane.pool.data[into] = 5.0
    synchronize(lane.pool.device)
    assert same(lane.pool, into, torch.full_like(lane.expected, 5.0)[:NUM_BLOCKS])
