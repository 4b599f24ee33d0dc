"""Workers without a rank table, at the worker: every row of its table in docs/protocol/membership.md.

Clocks advance only when a test sets them. Two tests at the end use real mailboxes over loopback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from pd_cluster.cluster.members.join_registrar import JoinPort
from pd_cluster.cluster.members.worker_joining import FIRST_BACKOFF_S, LAST_BACKOFF_S, MOST_CUT_ROUNDS, JoinMailbox
from pd_cluster.cluster.processes.port_reservations import free_ports
from pd_cluster.errors import ConfigError
from pd_cluster.net.connection_handshake import CUT_SHORT, NOT_ADMITTED, NOT_OPENED, OTHER_SECRET
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.timeouts import Timeouts
from tests.support.elastic_world import ElasticWorld
from tests.support.joining_worker import JOIN, TIMES, Seeker


def test_it_opens_says_join_and_is_registered() -> None:
    seeker = Seeker()
    assert seeker.joining.is_due
    conn = seeker.connect()
    assert seeker.joining.state == "opening"
    seeker.joining.on_opened(conn)
    assert (seeker.joining.state, seeker.lines.sent) == ("asking", [(conn, JOIN)])
    seeker.joining.on_answer(conn, "")
    seeker.now_s = 10 * TIMES.join_timeout_s
    seeker.joining.tick()
    assert seeker.joining.state == "joined"


def test_every_address_is_tried_with_every_pinned_key_before_it_waits() -> None:
    seeker = Seeker((("a", 1), ("b", 2)), (b"1", b"2"))
    tried = []
    for backoff_s in (FIRST_BACKOFF_S, 1.0, LAST_BACKOFF_S, LAST_BACKOFF_S):
        for _ in range(4):
            assert seeker.joining.is_due
            seeker.joining.connect(seeker.joining.address[0])
            seeker.joining.on_closed(seeker.joining.conn, NOT_OPENED)
        tried = seeker.tried
        seeker.lines.opened.clear()
        assert tried == [("a", 1, b"1"), ("a", 1, b"2"), ("b", 2, b"1"), ("b", 2, b"2")]
        seeker.now_s += backoff_s - 0.01
        assert not seeker.joining.is_due
        seeker.now_s += 0.01


def test_a_name_with_several_addresses_is_tried_at_each_of_them() -> None:
    seeker, hosts = Seeker((("a", 1), ("b", 2))), {"a": ("10.0.0.1", "10.0.0.2"), "b": ("10.0.0.3",)}
    for _ in range(6):
        while not seeker.joining.is_due:
            seeker.now_s += FIRST_BACKOFF_S / 4
        seeker.joining.connect(*hosts[seeker.joining.address[0]])
        seeker.joining.on_closed(seeker.joining.conn, NOT_OPENED)
    assert [int(host[-1]) for host, _, _ in seeker.tried] == [1, 3, 2, 3, 1, 3]


def test_each_reason_is_logged_once_until_it_is_registered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    seeker = Seeker((("a", 1), ("b", 2)))
    for _ in range(3):
        seeker.joining.on_closed(seeker.connect(), NOT_OPENED)
        seeker.joining.on_closed(seeker.connect(), CUT_SHORT)
    assert [record.getMessage() for record in caplog.records] == [
        f"not registered yet: a:1: {NOT_OPENED}",
        f"not registered yet: b:2: {CUT_SHORT}",
    ]
    seeker.joining.on_closed(seeker.register(), "the connection was closed")
    caplog.clear()
    seeker.joining.on_closed(seeker.connect(), NOT_OPENED)
    assert len(caplog.records) == 1


def must_give_up(seeker: Seeker, lost_s: float = 0.0) -> None:
    """Asserts that the worker gives up at its deadline, not earlier."""
    seeker.now_s = lost_s + TIMES.join_timeout_s
    seeker.joining.tick()
    seeker.now_s += 1.0
    with pytest.raises(
        ConfigError, match=r"no scheduler has admitted this worker within --join-timeout 60; .* attempt: [ah]:1: "
    ):
        seeker.joining.tick()


def test_a_lost_registration_is_sought_again_at_the_same_address_with_a_deadline_of_its_own() -> None:
    never = Seeker()
    never.joining.on_closed(never.connect(), NOT_OPENED)
    must_give_up(never)
    seeker = Seeker((("b", 2), ("a", 1)))
    seeker.joining.on_closed(seeker.connect(), NOT_OPENED)
    conn = seeker.register()
    seeker.now_s = lost_s = 1000.0
    seeker.joining.on_closed(conn, "the connection was closed")
    assert seeker.joining.state == "seeking"
    seeker.register()
    assert [port for _, port, _ in seeker.tried] == [2, 1, 1]
    seeker.joining.on_closed(seeker.joining.conn, "the connection was closed")
    must_give_up(seeker, lost_s)


def test_a_key_that_is_pinned_nowhere_ends_it_after_three_rounds() -> None:
    seeker = Seeker((("a", 1), ("b", 2)))
    for _ in range(MOST_CUT_ROUNDS * 2 - 1):
        seeker.joining.on_closed(seeker.connect(), CUT_SHORT)
    seeker.joining.on_closed(seeker.connect(), NOT_OPENED)
    for _ in range(MOST_CUT_ROUNDS * 2 - 1):
        seeker.joining.on_closed(seeker.connect(), CUT_SHORT)
    with pytest.raises(ConfigError, match=r"copy the scheduler's cluster.secret to this host"):
        seeker.joining.on_closed(seeker.connect(), CUT_SHORT)


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_refusal_or_another_secret_ends_it(is_registered: bool) -> None:
    for reason in (NOT_ADMITTED, OTHER_SECRET):
        seeker = Seeker()
        with pytest.raises(
            ConfigError, match=r"^--join h:1: the scheduler there has a secret that differs from this worker's"
        ):
            seeker.joining.on_closed(seeker.connect(), reason)
    seeker = Seeker()
    conn = seeker.register() if is_registered else seeker.connect()
    with pytest.raises(ConfigError, match=r"^--join h:1: the scheduler refuses this worker: taken$"):
        seeker.joining.on_answer(conn, "taken")


def test_a_scheduler_that_does_not_answer_is_left() -> None:
    seeker = Seeker()
    conn = seeker.connect()
    seeker.joining.on_opened(conn)
    seeker.now_s += TIMES.connect_timeout_s
    seeker.joining.tick()
    assert seeker.joining.state == "asking"
    seeker.now_s += 0.1
    seeker.joining.tick()
    assert (seeker.joining.state, seeker.lines.closed) == ("seeking", [conn])


def test_mail_of_an_earlier_connection_means_nothing() -> None:
    seeker = Seeker()
    first = seeker.connect()
    seeker.joining.on_closed(first, NOT_OPENED)
    second = seeker.register()
    seeker.joining.on_opened(first)
    seeker.joining.on_answer(first, "taken")
    seeker.joining.on_closed(first, NOT_ADMITTED)
    assert (seeker.joining.state, seeker.joining.conn) == ("joined", second)


# ---- over real mailboxes

SCHEDULER = KeyPair.of(b"private key of the scheduler 32b")
WAIT_S = 60.0


async def over_mailboxes(secret: bytes, pinned: bytes) -> None:
    """Registers a worker with these credentials at a real join port, then lets it leave."""
    world = ElasticWorld(1, 1)
    times = Timeouts(heartbeat_interval_s=0.05, dead_after_s=1.5, connect_timeout_s=5.0)
    (port,) = free_ports(1)
    own = Credentials(b"s" * 32, (SCHEDULER.public,), SCHEDULER.private)
    join_port = JoinPort(world.membership, own, times, "127.0.0.1", port)
    worker = JoinMailbox((("127.0.0.1", port),), JOIN, "d", 7, Credentials(secret, (pinned,)), times)
    listening, joining = asyncio.create_task(join_port.run()), asyncio.create_task(worker.run())

    async def until(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s
            if joining.done() and not joining.cancelled():
                joining.result()
            await asyncio.sleep(0.01)

    try:
        await until(lambda: "d" in world.names)
        assert world["d"].host == "192.0.2.7"
        await until(lambda: worker.joining.state == "joined")
        joining.cancel()
        await worker.leave()
        await until(lambda: "d" not in world.names)
    finally:
        listening.cancel()
        joining.cancel()
        await asyncio.gather(listening, joining, return_exceptions=True)
        worker.mailbox.close()
        join_port.close()


async def test_a_worker_registers_and_leaves_over_loopback() -> None:
    await over_mailboxes(b"s" * 32, SCHEDULER.public)


@pytest.mark.parametrize(
    ("secret", "pinned", "told"),
    [
        (b"x" * 32, SCHEDULER.public, "the scheduler there has a secret that differs"),
        (b"s" * 32, KeyPair.of(b"p" * 32).public, "it has another key, or is another program"),
    ],
    ids=["another secret", "another scheduler"],
)
async def test_a_stranger_is_not_heard(secret: bytes, pinned: bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await over_mailboxes(secret, pinned)
