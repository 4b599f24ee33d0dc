"""Admission of connections, without sockets and with the test's clock; random ones against recounted totals."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pd_cluster.api.connections.connection_limiter import (
    BODY_TIMEOUT_S,
    HEAD_TIMEOUT_S,
    NUM_SPARE_PER_HOST,
    AdmittedConnection,
    ConnectionLimiter,
    ConnectionState,
)
from pd_cluster.api.connections.refusals import PERIOD_S, RefusalLog
from pd_cluster.errors import Overloaded, Unavailable
from pd_cluster.settings.routing_settings import ConnectionLimits
from tests.support.clock import Clock

NUM_SPARE = ConnectionLimits().spare
MANY = 1 << 20  # number of descriptors


class LimitedConnection:
    def __init__(self) -> None:
        self.was_evicted = False
        self.num_expired = 0
        self.is_to_blame = True

    def evict(self) -> None:
        self.was_evicted = True

    def expire(self) -> bool:
        self.num_expired += 1
        return self.is_to_blame


def enter(
    limiter: ConnectionLimiter, address: str = "a", descriptor: int = 10
) -> tuple[LimitedConnection, AdmittedConnection]:
    connection = LimitedConnection()
    admitted = limiter.admit(connection, address, descriptor)
    assert admitted is not None
    return connection, admitted


def test_the_longest_idle_makes_room_and_nobody_when_all_are_busy() -> None:
    limiter = ConnectionLimiter(ConnectionLimits(total=1, per_host=0), MANY)
    entered = [enter(limiter) for _ in range(1 + NUM_SPARE)]
    limiter.begin_request(entered[0][1], is_probe=False)
    limiter.begin_request(entered[1][1], is_probe=True)
    enter(limiter)
    assert [connection.was_evicted for connection, _ in entered[:4]] == [False, False, True, False]
    limiter.end_request(entered[1][1])  # it becomes idle last
    for _ in range(NUM_SPARE - 2):
        enter(limiter)
    assert [at for at, (connection, _) in enumerate(entered) if not connection.was_evicted] == [0, 1]
    assert limiter.num_open == 1 + NUM_SPARE
    limiter = ConnectionLimiter(ConnectionLimits(total=1, per_host=0), MANY)
    for _ in range(1 + NUM_SPARE):
        limiter.begin_request(enter(limiter)[1], is_probe=bool(limiter.num_busy))
    assert limiter.admit(LimitedConnection(), "b", 10) is None
    assert not limiter.evict_idle()


def test_descriptors_and_addresses_have_limits() -> None:
    limiter = ConnectionLimiter(ConnectionLimits(num_kept_descriptors=28), 128)  # probes: 88 to 99
    low, high = enter(limiter, descriptor=87)[1], enter(limiter, descriptor=88)[1]
    limiter.begin_request(low, is_probe=False)
    with pytest.raises(Unavailable, match="--max-connections"):
        limiter.begin_request(high, is_probe=False)
    limiter.begin_request(high, is_probe=True)
    assert limiter.admit(LimitedConnection(), "a", 100) is None
    limiter.end_request(high)
    assert limiter.admit(LimitedConnection(), "a", 100) is not None, "an idle connection must make room"
    assert limiter.num_open == 2
    limiter = ConnectionLimiter(ConnectionLimits(total=100, per_host=2), MANY)
    for _ in range(2):
        limiter.begin_request(enter(limiter, "hog")[1], is_probe=False)
    with pytest.raises(Overloaded, match="--max-connections-per-host"):
        limiter.begin_request(enter(limiter, "hog")[1], is_probe=False)
    limiter.begin_request(enter(limiter, "other")[1], is_probe=False)
    first = enter(limiter, "quiet")[0]
    for _ in range(2 * NUM_SPARE_PER_HOST):
        enter(limiter, "hog")
    assert not first.was_evicted
    assert limiter.num_open == 2 + NUM_SPARE_PER_HOST + 2
    for _ in range(5):  # connections without an address are not limited per address
        limiter.begin_request(enter(limiter, "")[1], is_probe=False)
    share = ConnectionLimits(total=10, per_host=6).share(4)
    assert (share.total, share.per_host) == (2, 1), "processes must share the limit"
    assert ConnectionLimits(total=3, per_host=0).share(8) == ConnectionLimits(total=1, per_host=0)


def test_a_crowd_without_requests_has_the_low_descriptors() -> None:
    """A request on a high descriptor is served; the connection that has been idle longest is closed for it."""
    limiter = ConnectionLimiter(ConnectionLimits(num_kept_descriptors=28), 128)  # probes: 88 to 99
    crowd = [enter(limiter, descriptor=at)[0] for at in range(10, 88)]
    for number, descriptor in enumerate((88, 99), 1):
        limiter.begin_request(enter(limiter, descriptor=descriptor)[1], is_probe=False)
        assert [connection.was_evicted for connection in crowd] == [at < number for at in range(len(crowd))]
    assert (limiter.num_busy, limiter.num_open) == (2, len(crowd))


def test_deadlines_end_what_waits_for_its_client() -> None:
    clock = Clock()
    limiter = ConnectionLimiter(ConnectionLimits(), MANY, clock)
    (silent, _), (asking, admitted), (blameless, other) = enter(limiter), enter(limiter), enter(limiter)
    blameless.is_to_blame = False
    limiter.heads.end(admitted)
    limiter.bodies.begin(admitted)
    clock.now_s += HEAD_TIMEOUT_S
    limiter.sweep()
    assert (silent.num_expired, asking.num_expired, blameless.num_expired) == (1, 0, 1)
    clock.now_s += BODY_TIMEOUT_S - HEAD_TIMEOUT_S
    limiter.sweep()
    assert (silent.num_expired, asking.num_expired, blameless.num_expired) == (1, 1, 2)
    limiter.left(other)
    clock.now_s += 1000
    limiter.sweep()
    assert blameless.num_expired == 2


@pytest.mark.parametrize("seed", range(6))
def test_random_connections_are_counted_right(seed: int) -> None:
    choose = random.Random(seed)
    limits = ConnectionLimits(total=6, per_host=4)
    limiter = ConnectionLimiter(limits, MANY, Clock())
    present: list[tuple[LimitedConnection, AdmittedConnection]] = []
    for _ in range(1500):
        if choose.random() < 0.4:
            connection = LimitedConnection()
            admitted = limiter.admit(connection, choose.choice("abc"), 10)
            if admitted is not None:
                present.append((connection, admitted))
            present = [each for each in present if not each[0].was_evicted]
        elif present:
            _, admitted = choose.choice(present)
            match choose.randrange(4):
                case 0:
                    try:
                        limiter.begin_request(admitted, choose.random() < 0.2)
                    except Overloaded:
                        assert admitted.host.num_busy == limits.per_host
                    except Unavailable:
                        assert limiter.num_busy == limits.total
                case 1:
                    limiter.end_request(admitted)
                case 2:
                    limiter.left(admitted)
                    limiter.left(admitted)
                    present = [each for each in present if each[1] is not admitted]
        busy = Counter(admitted.address for _, admitted in present if admitted.state is ConnectionState.BUSY)
        assert limiter.num_open == len(present) <= limits.total + NUM_SPARE
        assert limiter.num_busy == sum(busy.values()) <= limits.total
        assert all(number <= limits.per_host for number in busy.values())
    for _, admitted in present:
        limiter.left(admitted)
    assert (limiter.num_open, limiter.num_busy) == (0, 0)


def test_refusals_are_told_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RefusalLog(clock)
    for _ in range(1000):
        refusals.note("10.0.0.1", "no Host")
    assert caplog.messages == ["rejected: 10.0.0.1: no Host"]
    clock.now_s += PERIOD_S
    refusals.tell()
    refusals.tell()
    assert caplog.messages[1:] == ["rejected: 10.0.0.1: no Host (999 since the last such line)"]
