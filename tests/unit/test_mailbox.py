"""Mail between mailboxes of one process over loopback: delivery, epochs, secrets, silence, end of file."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from pd_cluster import wire
from pd_cluster.config import PortRange, Timeouts
from pd_cluster.errors import ConfigError
from pd_cluster.mailbox import Mailbox
from pd_cluster.sockets import CurveKeys

SECRET = b"s" * 32
TIMES = Timeouts(heartbeat_interval_s=0.05, dead_after_s=0.5, connect_timeout_s=2.0)
WAIT_S = 10.0


class Box:
    """A mailbox whose events land in a queue."""

    def __init__(
        self,
        name: str,
        epoch: int,
        secret: bytes = SECRET,
        listen: bool = False,
        kind: Kind = "worker",
        key: bytes = b"",
    ) -> None:
        self.name, self.epoch = name, epoch
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.mailbox = Mailbox(name, epoch, kind, Credentials(secret, (SCHEDULER.public,), key), TIMES, self)
        self.port = self.mailbox.bind("127.0.0.1", PortRange()) if listen else 0
        self.mailbox.start()

    def connect_to(self, other: Box, epoch: int | None = None) -> str:
        mailbox = other.mailbox
        return self.mailbox.connect(mailbox.name, epoch or mailbox.epoch, "127.0.0.1", other.port, mailbox.public_key)

    @property
    def info(self) -> wire.PeerInfo:
        return wire.PeerInfo(
            name=self.mailbox.name,
            epoch=self.mailbox.epoch,
            role="prefill",
            host="127.0.0.1",
            control_port=self.port,
            public_key=self.mailbox.public_key,
        )

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self.events.put(("opened", conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        self.events.put(("message", conn, body) if not isinstance(body, wire.Heartbeat) else ("beat", conn, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self.events.put(("closed", conn, reason))

    def on_fatal(self, error: BaseException) -> None:
        self.events.put(("fatal", error))

    def load(self) -> wire.Load | None:
        return wire.Load(num_blocks=5)

    def wait(self, kind: str) -> tuple[Any, ...]:
        while True:
            event = self.events.get(timeout=WAIT_S)
            assert event[0] != "fatal", event
            if event[0] == kind:
                return event


@pytest.fixture
def box() -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def make(*args: Any, **kwargs: Any) -> Box:
        made.append(Box(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.mailbox.close()


def test_mail_goes_both_ways(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.mailbox.send(conn, wire.Offer("t", 3))  # before it is open: kept
    assert client.wait("opened")[1:3] == (conn, "decode-0@7")
    _, back, peer, kind = server.wait("opened")
    assert (peer, kind) == ("prefill-0@8", "worker")
    assert server.wait("message")[2] == wire.Offer("t", 3)
    server.mailbox.send(back, wire.Credit("t"))
    assert client.wait("message")[2] == wire.Credit("t")
    assert client.wait("beat")[2].load.num_blocks == 5


def test_mail_comes_in_order(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    for number in range(500):
        client.mailbox.send(conn, wire.Offer("t", number))
    assert [server.wait("message")[2].num_tokens for _ in range(500)] == list(range(500))


def test_mail_for_a_predecessor_is_dropped(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    wrong = client.mailbox.connect("decode-0", 6, "127.0.0.1", server.port)
    client.mailbox.send(wrong, wire.Offer("old", 1))
    right = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.mailbox.send(right, wire.Offer("new", 1))
    assert server.wait("message")[2].transfer_id == "new"


def test_another_secret_gets_no_connection(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8, secret=b"x" * 32)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.mailbox.send(conn, wire.Offer("t", 1))
    assert client.wait("closed")[1] == conn
    assert server.events.empty()


def test_a_key_that_knows_the_server_but_is_no_member_is_refused(box: Callable[..., Box]) -> None:
    """The server's public key alone is not enough: ZAP looks at the client's."""
    server = box("decode-0", 7, listen=True)
    keys = CurveKeys.from_secret(SECRET)
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.public, public, secret
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(f"tcp://127.0.0.1:{server.port}")
        assert monitor.poll(WAIT_S * 1000)
        number = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert number == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        socket.disable_monitor()


def test_nobody_listens(box: Callable[..., Box]) -> None:
    client = box("prefill-0", 8)
    gone = box("decode-0", 7, listen=True)
    gone.mailbox.close()
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", gone.port)
    assert client.wait("closed")[1] == conn


def test_end_of_file_is_noticed_at_once(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.wait("opened")
    server.mailbox.close()
    assert client.wait("closed")[1:] == (conn, "the connection was closed")


def test_silence_is_noticed_by_the_side_that_was_connected_to(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    conn = server.wait("opened")[1]
    client.mailbox.close()
    closed = server.wait("closed")
    assert closed[1] == conn
    assert "nothing heard" in closed[2] or "closed" in closed[2]


def test_who_speaks_over_a_connection_that_was_given_up_is_told(box: Callable[..., Box]) -> None:
    """As after a pause that only one side noticed: the other does not wait for silence."""
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    server.mailbox.disconnect(server.wait("opened")[1])
    assert client.wait("closed")[1:] == (conn, "the other end has given the connection up")


def test_after_a_long_pause_all_connections_are_lost(box: Callable[..., Box]) -> None:
    """The others have given this process up meanwhile; it must not believe in anything that it held before."""
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.wait("opened")
    client.mailbox._clock = lambda: time.monotonic() + 100
    _, closed, reason = client.wait("closed")
    assert closed == conn
    assert "this process stood still for" in reason


def test_a_heartbeat_can_be_sent_at_once(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.wait("beat")
    for _ in range(50):
        server.mailbox.beat()
    for _ in range(50):
        client.wait("beat")


def test_garbage_does_not_harm(box: Callable[..., Box]) -> None:
    server, client = box("decode-0", 7, listen=True), box("prefill-0", 8)
    conn = client.mailbox.connect("decode-0", 7, "127.0.0.1", server.port)
    client.wait("opened")
    client.mailbox._call(lambda: client.mailbox._connections[conn].socket.send(b"\xc1garbage"))
    client.mailbox._call(lambda: client.mailbox._connections[conn].socket.send_multipart([b"a", b"b"]))
    client.mailbox.send(conn, wire.Offer("after", 1))
    assert server.wait("message")[2].transfer_id == "after"


def test_a_taken_port_range_is_a_clear_error(box: Callable[..., Box]) -> None:
    server = box("decode-0", 7, listen=True)
    other = box("prefill-0", 8)
    with pytest.raises(ConfigError, match="--kv-port-range"):
        other.mailbox.bind("127.0.0.1", PortRange(server.port, server.port))
