"""KV events over sockets: numbered, replayed, bounded, and restricted to authorized readers."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pd_cluster.cluster.processes.port_reservations import free_ports
from pd_cluster.errors import ConfigError
from pd_cluster.extras.node_keys.node_key_files import (
    Node,
    PublicPart,
    TrustedNodes,
    new_keys,
    read_trusted_nodes,
    revoking,
    write_node_keys,
    write_public,
)
from pd_cluster.kv.kv_event_log import EventBatch
from pd_cluster.net import event_publisher as module
from pd_cluster.net import event_replays
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.settings.kv_events_config import EVENTS, KVEventsConfig, check_private
from pd_cluster.settings.process_configs import Credentials
from tests.support.kv_event_readers import (
    NOBODY,
    WAIT_MS,
    Reader,
    await_subscriber,
    batch,
)


class Bus:
    """Publishers and readers connected by two sockets in a folder."""

    def __init__(self, folder: Path, context: zmq.Context[Any]) -> None:
        self.events, self.replays, self.context = f"ipc://{folder}/events", f"ipc://{folder}/replay", context
        self.made: list[EventPublisher] = []

    def make(self, credentials: Credentials = NOBODY, **settings: Any) -> EventPublisher:
        own = {"endpoint": self.events, "replay_endpoint": self.replays, "topic": "kv"}
        self.made.append(EventPublisher(KVEventsConfig(enable_kv_cache_events=True, **(own | settings)), credentials))
        return self.made[-1]

    def reader(self, hwm: int = 1000) -> Reader:
        return Reader(self.context, self.events, hwm)

    def asking(self, num_requests: int = 1, first: int = 0) -> zmq.Socket[Any]:
        """Returns a socket with a short queue that has requested batches from `first` on."""
        socket: zmq.Socket[Any] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 10)
        socket.connect(self.replays)
        for _ in range(num_requests):
            socket.send_multipart([b"", first.to_bytes(8, "big")])
        return socket


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.02)
    context = zmq.Context()
    context.linger = 0  # applies to dropped sockets, too; otherwise closing the context waits for their messages
    found = Bus(tmp_path, context)
    yield found
    for each in found.made:
        each.close()
    context.destroy(linger=0)


def publish_110(made: EventPublisher) -> None:
    for number in range(110):
        made.publish(batch(number, 4000))


def number_at(socket: zmq.Socket[Any]) -> int:
    """Returns the number of the next batch; -1 at the end."""
    assert socket.poll(WAIT_MS)
    return int.from_bytes(socket.recv_multipart()[2], "big", signed=True)


def test_frames_are_numbered_and_lost_ones_come_again_as_far_as_they_are_kept(bus: Bus) -> None:
    made, replays = bus.make(buffer_steps=40), bus.replays
    reader = bus.reader()
    first = await_subscriber(made, reader)
    for number in range(first, first + 50):
        made.publish(batch(number))
    got = [reader.next() for _ in range(50)]
    assert [each[0] for each in got if each is not None] == list(range(first, first + 50))
    assert all(each is not None and each[1].ts == each[0] and each[1].data_parallel_rank == 0 for each in got)
    assert reader.past(replays, first + 20) == got[20:]  # as a reader does after a gap
    assert reader.past(replays, 0) == got[10:]
    assert reader.past(replays, first + 50) == []


def test_a_slow_subscriber_holds_nobody_and_finds_what_it_missed(bus: Bus) -> None:
    made = bus.make(hwm=4)
    slow, quick = (bus.reader(hwm) for hwm in (1, 1000))
    await_subscriber(made, slow)
    first = await_subscriber(made, quick)
    stop = first + 60
    for number in range(first, stop):  # 80 kB each, so that the slow reader's queues and socket buffers fill quickly
        made.publish(batch(number, 16_000))
        assert (found := quick.next()) is not None
        assert found[0] == number
    assert made.num_dropped >= 1
    heard = {}
    while (found := slow.next(200)) is not None:
        heard[found[0]] = found[1]
    missed = set(range(first, stop)) - set(heard)
    assert missed
    again = dict(slow.past(bus.replays, min(missed)))
    assert missed <= set(again)
    assert all(again[number].ts == number for number in range(min(missed), stop))


def test_a_subscriber_that_keeps_up_with_a_burst_misses_nothing(
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Covers more batches in a millisecond than its queue holds, each taken before the next is sent."""
    stands, gate = threading.Event(), threading.Event()

    def stand(self: EventPublisher, encoder: object) -> None:
        stands.set()
        gate.wait(60)

    made = bus.make(hwm=4)
    reader = bus.reader()
    first = await_subscriber(made, reader)
    monkeypatch.setattr(EventPublisher, "_turn", stand)  # the test's thread sends batches instead
    made.publish(batch(first))
    assert reader.next() is not None
    assert stands.wait(10)
    try:
        payload = msgspec.msgpack.encode(batch(0))
        for number in range(2000):
            made.send(number, payload)
            found = reader.next()
            assert found is not None, number
            assert found[0] == number
        assert made.num_dropped == 0
    finally:
        gate.set()


def test_the_engine_never_waits(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the publisher's thread is blocked, batches beyond the queue are dropped, counted, and leave number gaps."""
    gate = threading.Event()
    monkeypatch.setattr(EventPublisher, "send", lambda self, number, payload: gate.wait(10))
    made = bus.make(max_queue_size=5)
    for number in range(20):
        made.publish(batch(number))
    assert 20 - 5 - 1 <= made.num_dropped <= 15
    assert made.num_published == 20 - made.num_dropped
    gate.set()


def test_events_go_on_behind_a_fault(
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Covers a batch that cannot be encoded, a failing send, and sockets that fail to reopen after it."""
    made = bus.make()
    reader = bus.reader()
    await_subscriber(made, reader)
    made.publish(EventBatch(0.0, ["\ud800"]))  # type: ignore[list-item]
    await_subscriber(made, reader)
    assert made.num_dropped == 1
    faults = [zmq.ZMQError(zmq.ENOTSOCK)]
    sends, sockets = EventPublisher.send, made.context.socket

    def send(self: EventPublisher, number: int, payload: bytes) -> None:
        if faults:
            monkeypatch.setattr(made.context, "socket", fails_once)
            raise faults.pop()
        sends(self, number, payload)

    def fails_once(kind: int) -> Any:
        monkeypatch.setattr(made.context, "socket", sockets)
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(EventPublisher, "send", send)
    await_subscriber(made, reader)
    assert not faults
    assert made.num_dropped == 2
    assert [each.message for each in caplog.records if each.exc_info] == [
        "KV events: an error occurred; publishing continues"
    ]


@pytest.mark.parametrize("limit", ["until_s", "end_s"])
def test_past_batches_come_whole_through_short_queues(bus: Bus, limit: str) -> None:
    """Covers two requests of one reader, a third that only gets its end, another reader, and one that never reads."""
    made = bus.make(hwm=10)
    publish_110(made)
    nums = (1, 3, 1)
    sockets = [bus.asking(num, 10) for num in nums]
    for socket, num in zip(sockets[1:], nums[1:], strict=True):
        for request in range(num):
            wanted = [*(range(10, 110) if request < 2 else ()), -1]
            assert [number_at(socket) for _ in wanted] == wanted
    await_under_way(made, 1)
    (replay,) = made.replays.under_way
    assert replay.due is not None
    assert 10 < replay.due < 110
    setattr(replay, limit, 0.0)
    await_under_way(made, 0)
    assert [number for number, _ in bus.reader().past(bus.replays, 108)] == [108, 109]


def await_under_way(publisher: EventPublisher, num: int) -> None:
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while len(publisher.replays.under_way) != num:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)  # yields to the publisher's thread


def test_a_replay_ends_with_what_was_there_at_its_request(bus: Bus) -> None:
    """A replay has only the batches published before its request, however slow its reader is."""
    made = bus.make(hwm=10)
    publish_110(made)
    socket = bus.asking()
    for number in (*range(110), -1):
        assert number_at(socket) == number
        made.publish(batch(0, 4000))


def test_a_request_too_many_gets_its_end_at_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_replays, "MOST_REPLAYS", 1)
    made, reader = bus.make(hwm=10), bus.reader()
    publish_110(made)
    silent = bus.asking()
    assert silent.poll(WAIT_MS)
    assert reader.past(bus.replays, 0) == []
    (replay,) = made.replays.under_way
    replay.end_s = 0.0
    await_under_way(made, 0)
    assert [number for number, _ in reader.past(bus.replays, 108)] == [108, 109]


def test_strangers_and_revoked_readers_get_nothing_over_the_network(bus: Bus, tmp_path: Path) -> None:
    """Endpoints beyond this host use CURVE, so only authorized keys get events."""
    tmp_path.chmod(0o700)
    keys = {name: new_keys(name) for name in ("worker", "router", "stays", "other")}
    write_node_keys(tmp_path / "worker.key", keys["worker"])
    trusted, (port,) = tmp_path / "trusted.nodes", free_ports(1)
    nodes = [Node(name, [PublicPart(each.public[0].hex())]) for name, each in keys.items() if name != "other"]
    write_public(trusted, TrustedNodes(1, nodes))
    credentials = Credentials(b"s" * 32, node_key_file=str(tmp_path / "worker.key"), trusted_nodes=str(trusted))
    made, endpoint = bus.make(credentials, endpoint=f"tcp://*:{port}", replay_endpoint=None), f"tcp://127.0.0.1:{port}"
    router, stays, other = (
        Reader(bus.context, endpoint, keys=(keys[name].private[0], keys["worker"].public[0]))
        for name in ("router", "stays", "other")
    )
    strangers = [Reader(bus.context, endpoint), other]
    await_subscriber(made, router)
    before = made.publisher
    write_public(trusted, revoking(read_trusted_nodes(trusted), "router", "", trusted, "2026-11-26T00:00:00Z"))
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while made.publisher is before:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)  # yields to the publisher's thread
    while router.next(0) is not None:
        pass
    await_subscriber(made, stays)
    assert router.next(0) is None
    assert not any(each.socket.poll(0) for each in strangers)


# ---- the setting


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object with enable_kv_cache_events, publisher, endpoint"),
        ({"endpont": "x"}, "'endpont': unknown field; did you mean endpoint?"),
        ({"endpoint": "tcp://indexer:5557"}, "expected tcp://ADDRESS:PORT with an address of this host"),
        ({"endpoint": "inproc://x"}, "subscribers connect, this process binds"),
        ({"replay_endpoint": "tcp://*:5557"}, "endpoint and replay_endpoint are the same"),
        ({"topic": "kv\ud800"}, "topic 'kv\\ud800': contains half of a surrogate pair"),
    ],
)
def test_settings_with_faults(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EVENTS.read("kv_events_config", given if isinstance(given, str) else json.dumps(given))
    assert told in str(caught.value)
    assert str(caught.value).startswith("--kv-events-config")


@pytest.mark.parametrize(
    ("endpoint", "is_private"),
    [
        ("tcp://*:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///run/pd/events", True),
    ],
)
def test_events_stay_on_the_host_or_are_encrypted(endpoint: str, is_private: bool) -> None:
    for given in ({"endpoint": endpoint}, {"endpoint": "ipc:///x", "replay_endpoint": endpoint}):
        config = EVENTS.read("kv_events_config", json.dumps({"enable_kv_cache_events": True, **given}))
        check_private(config, has_curve=True)
        if is_private:
            check_private(config, has_curve=False)
            continue
        with pytest.raises(ConfigError, match=r"give tcp://127\.0\.0\.1:PORT or ipc://PATH, or --node-key-file"):
            check_private(config, has_curve=False)


def test_instances_of_a_host_have_endpoints_of_their_own() -> None:
    config = KVEventsConfig(True, "zmq", "tcp://127.0.0.1:5557", "ipc:///run/replay")
    assert config.of_instance(0) == config
    assert config.of_instance(2).endpoints == ("tcp://127.0.0.1:5559", "ipc:///run/replay_2")
    assert EVENTS.read("kv_events_config", EVENTS.write(config)) == config
    assert [each.is_on for each in (config, KVEventsConfig(), KVEventsConfig(True, "null"))] == [True, False, False]
