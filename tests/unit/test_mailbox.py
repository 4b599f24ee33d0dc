"""Mail between mailboxes in one process over loopback: delivery, epochs, secrets, silence, end of file."""

from __future__ import annotations

import contextlib
import gc
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.errors import ConfigError
from pd_cluster.net import connection_handshake, zmq_sockets
from pd_cluster.net import mailbox as module
from pd_cluster.net.connection_handshake import NO_HANDSHAKE, NOT_ADMITTED, OTHER_SECRET
from pd_cluster.net.zmq_sockets import receive
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LinkState
from tests.support.full_disks import few_files
from tests.support.held import held, more_than
from tests.support.mail import SCHEDULER, SECRET, WAIT_S, Box

OTHER_KEY = b"k" * 32
TIMES = Timeouts(heartbeat_interval_s=0.05, dead_after_s=1.5, connect_timeout_s=5.0)
SELDOM = Timeouts(heartbeat_interval_s=30.0, dead_after_s=100.0)


@pytest.fixture
def box() -> Iterator[Callable[..., Box]]:
    """Yields a factory of mailboxes: listening ones are workers; others are schedulers, unless given another key."""
    made: list[Box] = []

    def make(
        name: str,
        epoch: int,
        secret: bytes = SECRET,
        listen: bool = False,
        key: bytes = b"",
        times: Timeouts = TIMES,
        kind: Any = "",
    ) -> Box:
        is_worker = listen or bool(key)
        credentials = Credentials(secret, (SCHEDULER.public,), key if is_worker else SCHEDULER.private)
        kind = kind or ("worker" if is_worker else "scheduler")
        made.append(Box(name, epoch, kind, credentials, times, listen))
        return made[-1]

    yield make
    for each in made:
        each.mailbox.close()


@pytest.fixture
def pair(box: Callable[..., Box]) -> tuple[Box, Box, str, str]:
    """Returns a listening worker, a scheduler connected to it, and each one's name of the connection."""
    server, client = box("decode-0", 7, listen=True), box("scheduler", 8)
    conn = client.connect_to(server)
    assert client.wait("opened")[1:3] == (conn, "decode-0@7")
    _, back, peer, kind = server.wait("opened")
    assert (peer, kind) == ("scheduler@8", "scheduler")
    return server, client, conn, back


def test_mail_goes_both_ways_in_order(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.connect_to(server)
    for number in range(500):
        client.mailbox.send(conn, wire.Offer("t", number))  # kept until the connection opens
    back = server.wait("opened")[1]
    assert [server.wait("message")[2] for _ in range(500)] == [wire.Offer("t", number) for number in range(500)]
    server.mailbox.send(back, wire.Credit("t", [0]))
    assert client.wait("message")[2] == wire.Credit("t", [0])
    assert client.beats.get(timeout=WAIT_S).load == wire.Load(num_blocks=5)


def test_the_last_words_before_the_end_are_heard(pair: tuple[Box, Box, str, str]) -> None:
    """Messages before the end of a connection arrive; otherwise a drained worker's last tokens would be recomputed."""
    server, client, _, back = pair
    for number in range(200):
        server.mailbox.send(back, wire.Cancel(f"{number}", "x" * 100_000))
    assert server.mailbox.await_confirmed(WAIT_S)
    server.mailbox.close()
    assert [client.wait("message")[2].transfer_id for _ in range(200)] == [f"{number}" for number in range(200)]


def test_nobody_waits_for_a_peer_that_reads_nothing_or_is_gone(pair: tuple[Box, Box, str, str]) -> None:
    server, client, _, back = pair
    assert server.mailbox.await_confirmed(WAIT_S), "nothing was sent, so nothing is awaited"
    held = threading.Event()
    client.on_message = lambda *_: held.wait(WAIT_S)  # type: ignore[method-assign, assignment]
    server.mailbox.send(back, wire.Credit("t", [0]))
    assert not server.mailbox.await_confirmed(0.2), "the peer is paused, and its silence not noticed yet"
    assert server.wait("closed")[1] == back
    assert server.mailbox.await_confirmed(WAIT_S), "the peer was given up, so nothing is awaited"
    held.set()


def test_mail_for_a_predecessor_is_dropped(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    wrong = client.connect_to(server, epoch=6)
    client.mailbox.send(wrong, wire.Offer("old", 1))
    right = client.connect_to(server)
    client.mailbox.send(right, wire.Offer("new", 1))
    assert server.wait("message")[2].transfer_id == "new"


def test_another_secret_gets_no_connection(box: Callable[..., Box]) -> None:
    """The worker admits the scheduler's key, but the scheduler gets no valid proof, and sends nothing."""
    server, client = box("decode-0", 7, listen=True), box("scheduler", 8, secret=b"x" * 32)
    conn = client.connect_to(server)
    client.mailbox.send(conn, wire.Offer("t", 1))
    assert client.wait("closed")[1:] == (conn, OTHER_SECRET)
    assert server.wait("opened")[2] == "scheduler@8"
    assert server.wait("closed")
    assert server.events.empty()


def test_the_clusters_secret_is_not_enough_to_connect(box: Callable[..., Box]) -> None:
    """The secret and the worker's public key do not suffice, because ZAP checks the client's key."""
    server, client = box("decode-0", 7, listen=True), box("scheduler", 8, key=OTHER_KEY)
    conn = client.connect_to(server)
    assert client.wait("closed")[1:] == (conn, NOT_ADMITTED)
    assert server.events.empty()


def test_a_worker_connects_once_a_scheduler_has_named_it(box: Callable[..., Box]) -> None:
    server, worker, scheduler = box("decode-0", 7, listen=True), box("prefill-0", 8, key=OTHER_KEY), box("scheduler", 9)
    assert worker.connect_to(server) == worker.wait("closed")[1]
    told = scheduler.connect_to(server)
    scheduler.mailbox.send(told, wire.Peers([worker.info]))
    assert server.wait("message")[2] == wire.Peers([worker.info])
    assert worker.connect_to(server) == worker.wait("opened")[1]
    assert [server.wait("opened")[2:]] == [("prefill-0@8", "worker")]
    scheduler.mailbox.send(told, wire.Peers([]))
    assert server.wait("message")[2] == wire.Peers([])
    assert worker.connect_to(server) == worker.wait("closed")[1]


@pytest.mark.parametrize(("name", "epoch"), [("prefill-1", 8), ("prefill-0", 9), ("scheduler", 8)])
def test_a_worker_is_taken_for_nobody_else(
    box: Callable[..., Box], name: str, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    monkeypatch.setattr(connection_handshake.log, "error", lambda *words: said.put(words))
    server, scheduler = box("decode-0", 7, listen=True), box("scheduler", 1)
    worker = box(name, epoch, key=OTHER_KEY, kind="scheduler" if name == "scheduler" else "worker")
    named = msgspec.structs.replace(worker.info, name="prefill-0", epoch=8)
    told = scheduler.connect_to(server)
    scheduler.mailbox.send(told, wire.Peers([named]))
    assert server.wait("message")[2] == wire.Peers([named])
    worker.mailbox.send(worker.connect_to(server), wire.Peers([]))
    assert said.get(timeout=WAIT_S)[1] == f"{name}@{epoch}"
    scheduler.mailbox.send(told, wire.Offer("after", 1))
    assert server.wait("message")[2] == wire.Offer("after", 1)


def test_nobody_listens(box: Callable[..., Box]) -> None:
    client, gone = box("prefill-0", 8), box("decode-0", 7, listen=True)
    gone.mailbox.close()
    assert client.connect_to(gone) == client.wait("closed")[1]


def test_the_other_end_stands_still_while_the_connection_opens(
    box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections for a paused process; this is not mistaken for a wrong key."""
    monkeypatch.setattr(zmq_sockets, "HANDSHAKE_TIMEOUT_S", 0.3)
    client = box("prefill-0", 8)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", silent.getsockname()[1], client.mailbox.public_key)
        assert client.wait("closed")[1:] == (conn, NO_HANDSHAKE)


def test_end_of_file_is_noticed_at_once(pair: tuple[Box, Box, str, str]) -> None:
    server, client, conn, _ = pair
    server.mailbox.close()
    assert client.wait("closed")[1:] == (conn, "the connection was closed")


def test_a_heartbeat_finds_connections_that_the_other_end_has_closed(box: Callable[..., Box]) -> None:
    """A draining worker sends a heartbeat at once, so that it does not wait for a scheduler that has gone."""
    times = Timeouts(heartbeat_interval_s=2 * WAIT_S, dead_after_s=10 * WAIT_S)
    server, client = (box(name, 7, listen=name == "decode-0", times=times) for name in ("decode-0", "scheduler"))
    client.connect_to(server)
    conn = server.wait("opened")[1]
    client.mailbox.close()
    for _ in range(1000):
        server.mailbox.beat()
        with contextlib.suppress(queue.Empty):
            found = server.events.get(timeout=WAIT_S / 1000)
            if found[0] == "closed":
                break
    assert found == ("closed", conn, "the connection was closed")


def test_who_speaks_over_a_connection_that_was_given_up_is_told(pair: tuple[Box, Box, str, str]) -> None:
    """After a pause that only one side noticed, the other side is notified on its next message, not by silence."""
    server, client, conn, back = pair
    server.mailbox.disconnect(back)
    assert client.wait("closed")[1:] == (conn, "the other end has given up the connection")


def test_after_a_long_pause_all_connections_are_lost(pair: tuple[Box, Box, str, str]) -> None:
    """Peers have closed their connections by then, so the process must not rely on its earlier state."""
    _, client, conn, _ = pair
    client.ahead_s = 100
    assert client.wait("closed")[1:] == (conn, wire.PAUSED)


def test_a_heartbeat_can_be_sent_at_once(pair: tuple[Box, Box, str, str]) -> None:
    server, client, _, _ = pair
    client.beats.get(timeout=WAIT_S)
    for _ in range(50):
        server.mailbox.beat()
    for _ in range(50):
        client.beats.get(timeout=WAIT_S)


def test_heartbeats_that_shall_come_soon_share_one(box: Callable[..., Box]) -> None:
    server, scheduler = box("decode-0", 7, listen=True, times=SELDOM), box("scheduler", 8, times=SELDOM)
    scheduler.connect_to(server)
    scheduler.wait("opened")
    server.wait("opened")
    started_s, num_beats = time.monotonic(), 0
    for _ in range(3):
        for _ in range(100):
            server.mailbox.beat_soon()
        scheduler.beats.get(timeout=WAIT_S)
        num_beats += 1
        while not scheduler.beats.empty():
            scheduler.beats.get()
            num_beats += 1
    assert num_beats <= 2 + (time.monotonic() - started_s) / module.BEAT_GAP_S
    assert module.BEAT_GAP_S <= 0.025


def test_workers_are_not_told_of_what_schedulers_show(box: Callable[..., Box]) -> None:
    server, scheduler = box("decode-0", 7, listen=True, times=SELDOM), box("scheduler", 8, times=SELDOM)
    worker = box("prefill-0", 9, key=OTHER_KEY, times=SELDOM)
    scheduler.mailbox.send(scheduler.connect_to(server), wire.Peers([worker.info]))
    server.wait("message")
    worker.connect_to(server)
    to_worker = server.wait("opened")[1]
    server.mailbox.beat_soon()
    scheduler.beats.get(timeout=WAIT_S)
    server.mailbox.beat()
    server.mailbox.send(to_worker, wire.Offer("after", 1))
    assert worker.wait("message")[2] == wire.Offer("after", 1)
    assert worker.beats.qsize() == 1, "expected one heartbeat, with all links"


@pytest.mark.parametrize(
    "garbage", [[b"\xc1garbage"], [100_000 * b"\x91"], [b"a", b"b"]], ids=["invalid", "nested", "two frames"]
)
def test_garbage_and_frames_over_another_key_do_not_harm(
    pair: tuple[Box, Box, str, str], garbage: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client chooses its ZeroMQ identity, and may reuse a free one, so frames are checked by the connection's key."""
    server, client, conn, _ = pair

    def received(router: Any) -> tuple[bytes, bytes, list[bytes]]:
        identity, key, frames = receive(router)
        key = OTHER_KEY if b"forged" in frames[0] else key
        return identity, key, garbage if b"garbage" in frames[0] else frames

    monkeypatch.setattr(module, "receive", received)
    for name in ("garbage", "forged", "own"):
        client.mailbox.send(conn, wire.Offer(name, 1))
    assert server.wait("message")[2].transfer_id == "own"


def test_a_taken_port_range_is_a_clear_error(box: Callable[..., Box]) -> None:
    server = box("decode-0", 7, listen=True)
    with pytest.raises(ConfigError, match="--kv-port-range"):
        box("prefill-0", 8).mailbox.bind("127.0.0.1", PortRange(server.port, server.port))


def test_closed_or_given_up_it_holds_nothing_and_takes_no_orders(box: Callable[..., Box]) -> None:
    before = held()
    worker, scheduler = box("w", 1, listen=True), box("s", 2)
    first = scheduler.connect_to(worker)
    scheduler.wait("opened")
    gc.disable()
    try:
        connected = held()
        for _ in range(5):
            conn = scheduler.connect_to(worker)
            scheduler.wait("opened")
            scheduler.mailbox.disconnect(conn)
        assert more_than(connected) == Counter()
    finally:
        gc.enable()
    for each in (worker, scheduler):
        each.mailbox.close()
        each.mailbox.close()
        each.mailbox.send(first, wire.Abort("r", 1))
    assert more_than(before) == Counter()


def test_a_mailbox_has_more_peers_than_sockets_in_a_default_context(box: Callable[..., Box]) -> None:
    """A ZeroMQ context allows 1,023 sockets by default, and each peer takes three."""
    worker, own = box("decode-0", 7, listen=True, times=SELDOM), box("scheduler", 1, times=SELDOM)
    for _ in range(10):  # in groups, because all handshakes at once would exceed the deadline
        conns = {own.connect_to(worker) for _ in range(40)}
        assert {own.next("opened")[1] for _ in conns} == conns


def test_a_mailbox_without_descriptors_goes_on(box: Callable[..., Box]) -> None:
    """A connection that cannot open is reported as closed; others stay; later ones open once descriptors are free."""
    worker, own = box("decode-0", 7, listen=True, times=SELDOM), box("scheduler", 1, times=SELDOM)
    first = own.connect_to(worker)
    assert own.next("opened")[1] == first
    with few_files(20):
        for _ in range(10):
            own.connect_to(worker)
        while "Too many open files" not in (reason := own.wait("closed")[2]):
            pass  # a connection that failed to open
    assert reason.startswith("cannot connect to 127.0.0.1:")
    later = own.connect_to(worker)
    while own.wait("opened")[1] != later:
        pass
    own.mailbox.send(first, wire.ResetCache())
    assert worker.wait("message")[2] == wire.ResetCache()


def test_links_and_peers_are_told_by_what_has_changed(box: Callable[..., Box]) -> None:
    """Each scheduler gets all links and then changes; workers get none. A gap closes the connection."""
    server, first, second = (box("prefill-0", 7, listen=True, times=SELDOM), *(box(n, 8, times=SELDOM) for n in "ab"))
    worker = box("decode-0", 9, key=OTHER_KEY, times=SELDOM)
    told = first.connect_to(server)
    first.mailbox.send(told, wire.Peers([worker.info]))
    assert server.wait("message")[2] == wire.Peers([worker.info])
    worker.connect_to(server)
    worker.wait("opened")
    states = [LinkState("opening"), LinkState("up", ("shm",))]
    for links in ({"d0@1": states[0], "d1@1": states[0]}, {"d0@1": states[1], "d1@1": states[0]}, {"d0@1": states[1]}):
        server.links = links
        server.mailbox.beat()
        assert _links_of(first) == links
        assert _links_of(worker) == {}
    other = second.connect_to(server)
    second.wait("opened")
    server.mailbox.beat()
    assert _links_of(second) == server.links

    first.mailbox.send(told, wire.Peers([server.info], 0, 2, ["decode-0@9"]))
    assert server.wait("message")[2] == wire.Peers([server.info])
    first.mailbox.send(told, wire.Peers([], 0, 4))
    assert server.wait("closed")[2] == module.OUT_OF_ORDER
    assert first.wait("closed")[1:] == (told, module.OUT_OF_ORDER)
    again = first.connect_to(server)
    first.mailbox.send(again, wire.Peers([worker.info], 1))
    assert server.wait("message")[2] == wire.Peers([worker.info], 1)
    second.mailbox.send(other, wire.Peers([], 2))
    assert server.wait("message")[2] == wire.Peers([], 2)
    first.mailbox.send(again, wire.Peers([server.info], 1, 2))
    assert first.wait("message")[2] == wire.StaleTerm(2)
    second.mailbox.send(other, wire.Peers([worker.info], 2, 2))
    assert server.wait("message")[2] == wire.Peers([worker.info], 2), "the refused order must have no effect"


def _links_of(box: Box) -> dict[str, LinkState]:
    """Returns the link states in the next heartbeat."""
    load = box.beats.get(timeout=WAIT_S).load
    assert load is not None
    return load.links
