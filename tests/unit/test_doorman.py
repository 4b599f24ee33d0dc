"""Admission of connections, without sockets and with the test's own clock; random visits against recomputed counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pd_cluster.api.front.doorman import BODY_TIMEOUT_S, HEAD_TIMEOUT_S, NUM_SPARE_PER_HOST, Doorman, State, Visit
from pd_cluster.api.front.refusals import PERIOD_S, RefusalLog
from pd_cluster.errors import Overloaded, Unavailable
from pd_cluster.settings.routing import ConnectionLimits

NUM_SPARE = ConnectionLimits().spare
MANY = 1 << 20  # descriptors


class Guest:
    def __init__(self) -> None:
        self.was_evicted = False
        self.num_expired = 0
        self.is_to_blame = True

    def evict(self) -> None:
        self.was_evicted = True

    def expire(self) -> bool:
        self.num_expired += 1
        return self.is_to_blame


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def enter(doorman: Doorman, address: str = "a", descriptor: int = 10) -> tuple[Guest, Visit]:
    guest = Guest()
    visit = doorman.admit(guest, address, descriptor)
    assert visit is not None
    return guest, visit


def test_the_longest_idle_makes_room_and_nobody_when_all_are_busy() -> None:
    doorman = Doorman(ConnectionLimits(total=1, per_host=0), MANY)
    visits = [enter(doorman) for _ in range(1 + NUM_SPARE)]
    doorman.begin_request(visits[0][1], is_probe=False)
    doorman.begin_request(visits[1][1], is_probe=True)
    enter(doorman)
    assert [guest.was_evicted for guest, _ in visits[:4]] == [False, False, True, False]
    doorman.end_request(visits[1][1])  # now it is the last to have become idle
    for _ in range(NUM_SPARE - 2):
        enter(doorman)
    assert [at for at, (guest, _) in enumerate(visits) if not guest.was_evicted] == [0, 1]
    assert doorman.num_open == 1 + NUM_SPARE
    doorman = Doorman(ConnectionLimits(total=1, per_host=0), MANY)
    for _ in range(1 + NUM_SPARE):
        doorman.begin_request(enter(doorman)[1], is_probe=bool(doorman.num_busy))
    assert doorman.admit(Guest(), "b", 10) is None
    assert not doorman.make_room()


def test_descriptors_and_addresses_have_limits() -> None:
    doorman = Doorman(ConnectionLimits(num_kept_descriptors=28), 128)  # probes: 88 to 99
    low, high = enter(doorman, descriptor=87)[1], enter(doorman, descriptor=88)[1]
    doorman.begin_request(low, is_probe=False)
    with pytest.raises(Unavailable, match="--max-connections"):
        doorman.begin_request(high, is_probe=False)
    doorman.begin_request(high, is_probe=True)
    assert doorman.admit(Guest(), "a", 100) is None
    doorman.end_request(high)
    assert doorman.admit(Guest(), "a", 100) is not None, "an idle one has made room"
    assert doorman.num_open == 2
    doorman = Doorman(ConnectionLimits(total=100, per_host=2), MANY)
    for _ in range(2):
        doorman.begin_request(enter(doorman, "hog")[1], is_probe=False)
    with pytest.raises(Overloaded, match="--max-connections-per-host"):
        doorman.begin_request(enter(doorman, "hog")[1], is_probe=False)
    doorman.begin_request(enter(doorman, "other")[1], is_probe=False)
    first = enter(doorman, "quiet")[0]
    for _ in range(2 * NUM_SPARE_PER_HOST):
        enter(doorman, "hog")
    assert not first.was_evicted
    assert doorman.num_open == 2 + NUM_SPARE_PER_HOST + 2
    for _ in range(5):  # connections without an address have no such limit
        doorman.begin_request(enter(doorman, "")[1], is_probe=False)
    share = ConnectionLimits(total=10, per_host=6).share(4)
    assert (share.total, share.per_host) == (2, 1), "processes share the whole"
    assert ConnectionLimits(total=3, per_host=0).share(8) == ConnectionLimits(total=1, per_host=0)


def test_a_crowd_without_requests_has_the_low_descriptors() -> None:
    """A request on a high one is served in the place of the connection that has been idle longest."""
    doorman = Doorman(ConnectionLimits(num_kept_descriptors=28), 128)  # probes: 88 to 99
    crowd = [enter(doorman, descriptor=at)[0] for at in range(10, 88)]
    for number, descriptor in enumerate((88, 99), 1):
        doorman.begin_request(enter(doorman, descriptor=descriptor)[1], is_probe=False)
        assert [guest.was_evicted for guest in crowd] == [at < number for at in range(len(crowd))]
    assert (doorman.num_busy, doorman.num_open) == (2, len(crowd))


def test_deadlines_end_what_waits_for_its_client() -> None:
    clock = Clock()
    doorman = Doorman(ConnectionLimits(), MANY, clock)
    (silent, _), (asking, visit), (blameless, other) = enter(doorman), enter(doorman), enter(doorman)
    blameless.is_to_blame = False
    doorman.heads.end(visit)
    doorman.bodies.begin(visit)
    clock.now_s += HEAD_TIMEOUT_S
    doorman.sweep()
    assert (silent.num_expired, asking.num_expired, blameless.num_expired) == (1, 0, 1)
    clock.now_s += BODY_TIMEOUT_S - HEAD_TIMEOUT_S
    doorman.sweep()
    assert (silent.num_expired, asking.num_expired, blameless.num_expired) == (1, 1, 2)
    doorman.left(other)
    clock.now_s += 1000
    doorman.sweep()
    assert blameless.num_expired == 2


@pytest.mark.parametrize("seed", range(6))
def test_random_visits_are_counted_right(seed: int) -> None:
    choose = random.Random(seed)
    limits = ConnectionLimits(total=6, per_host=4)
    doorman = Doorman(limits, MANY, Clock())
    present: list[tuple[Guest, Visit]] = []
    for _ in range(1500):
        if choose.random() < 0.4:
            guest = Guest()
            visit = doorman.admit(guest, choose.choice("abc"), 10)
            if visit is not None:
                present.append((guest, visit))
            present = [each for each in present if not each[0].was_evicted]
        elif present:
            _, visit = choose.choice(present)
            match choose.randrange(4):
                case 0:
                    try:
                        doorman.begin_request(visit, choose.random() < 0.2)
                    except Overloaded:
                        assert visit.host.num_busy == limits.per_host
                    except Unavailable:
                        assert doorman.num_busy == limits.total
                case 1:
                    doorman.end_request(visit)
                case 2:
                    doorman.left(visit)
                    doorman.left(visit)
                    present = [each for each in present if each[1] is not visit]
        busy = Counter(visit.address for _, visit in present if visit.state is State.BUSY)
        assert doorman.num_open == len(present) <= limits.total + NUM_SPARE
        assert doorman.num_busy == sum(busy.values()) <= limits.total
        assert all(number <= limits.per_host for number in busy.values())
    for _, visit in present:
        doorman.left(visit)
    assert (doorman.num_open, doorman.num_busy) == (0, 0)


def test_refusals_are_told_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RefusalLog(clock)
    for _ in range(1000):
        refusals.note("10.0.0.1", "no Host")
    assert caplog.messages == ["turned away: 10.0.0.1: no Host"]
    clock.now_s += PERIOD_S
    refusals.tell()
    refusals.tell()
    assert caplog.messages[1:] == ["turned away: 10.0.0.1: no Host (999 since the last such line)"]
