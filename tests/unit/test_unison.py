"""The rounds of a unit: what each message does, and a simulation of 2 to 8 members through random orders of events."""

from __future__ import annotations

import pytest

from pd_cluster import wire
from pd_cluster.engine.step.unison import Unison
from pd_cluster.errors import InstanceLost
from tests.support.unit_world import SimulatedUnit

NUM_ORDERS = 10_000
IDLE = [0, 0]


def two_members() -> tuple[Unison, list[wire.Body]]:
    sent: list[wire.Body] = []
    return Unison(0, 2, sent.append), sent


def test_a_member_sleeps_until_it_or_a_mate_has_work() -> None:
    unison, sent = two_members()
    assert not unison.enters(has_work=False)
    unison.heard(1, wire.UnitWake(0))
    assert not unison.is_asleep
    assert unison.enters(has_work=True)  # the waker has told all
    assert sent == []
    assert unison.agreed([3, 1])
    assert unison.agreed([0, 1])
    assert not unison.is_asleep
    assert not unison.agreed(IDLE)
    assert unison.is_asleep
    unison.heard(1, wire.UnitWake(2))  # of a round that is over
    assert not unison.enters(has_work=False)
    assert unison.enters(has_work=True)
    assert sent == [wire.UnitWake(3)]
    assert (unison.round, unison.num_rounds, unison.num_idle_rounds) == (3, 3, 2)


def test_a_wake_that_overtakes_the_counts_is_kept() -> None:
    unison, sent = two_members()
    assert unison.enters(has_work=True)
    unison.heard(1, wire.UnitWake(1))
    assert not unison.agreed(IDLE)
    assert unison.enters(has_work=False)
    assert sent == [wire.UnitWake(0)]
    with pytest.raises(InstanceLost, match=r"member 1 .* round 3, but member 0 is in round 1: they are out of step"):
        unison.heard(1, wire.UnitWake(3))
    assert not unison.agreed(IDLE)
    with pytest.raises(InstanceLost, match="is asleep before round 2"):
        unison.heard(1, wire.UnitWake(3))


def test_a_unit_drains_and_ends_together() -> None:
    unison, sent = two_members()
    with pytest.raises(InstanceLost, match="decode-3, member 1 of 2 of this unit, is lost: silence"):
        unison.lost(1, "decode-3", "silence")
    unison.drain()
    unison.drain()
    unison.done()
    unison.done()
    assert sent == [wire.UnitDrain(), wire.UnitDone()]
    with pytest.raises(InstanceLost):
        unison.lost(1, "decode-3", "silence")
    unison.heard(1, wire.UnitWake(0))
    unison.heard(1, wire.UnitDone())
    assert not unison.may_end  # in a round
    assert unison.enters(has_work=False)
    assert not unison.agreed(IDLE)
    assert unison.may_end
    unison.lost(1, "decode-3", "end of file")
    other, sent = two_members()
    other.heard(1, wire.UnitDrain())
    other.drain()
    assert other.is_draining
    assert sent == []


def test_members_stay_in_step_in_any_order() -> None:
    for seed in range(NUM_ORDERS):
        SimulatedUnit(seed).run()


@pytest.mark.slow
def test_members_stay_in_step_in_many_orders() -> None:
    for seed in range(NUM_ORDERS, NUM_ORDERS + 300_000):
        SimulatedUnit(seed).run()


class SkipsExchange(Unison):
    """Goes on to the next round without the mates, once, when it has no rows."""

    has_skipped = False

    def enters(self, has_work: bool) -> bool:
        if super().enters(has_work) and not has_work and not self.has_skipped:
            self.has_skipped = True
            self.agreed([1] * self._size)
        return not self.is_asleep


class ObeysOldWake(Unison):
    def heard(self, rank: int, message: wire.UnitWake | wire.UnitDrain | wire.UnitDone) -> None:
        is_old = isinstance(message, wire.UnitWake) and self.is_asleep
        super().heard(rank, wire.UnitWake(self.round) if is_old else message)


class DropsKeptWake(Unison):
    def heard(self, rank: int, message: wire.UnitWake | wire.UnitDrain | wire.UnitDone) -> None:
        if not isinstance(message, wire.UnitWake) or self.is_asleep:
            super().heard(rank, message)


class EndsAlone(Unison):
    @property
    def may_end(self) -> bool:
        return self.is_asleep and self._rank in self._done


class IgnoresLoss(Unison):
    def lost(self, rank: int, mate: str, reason: str) -> None:
        pass


FAULTS = [SkipsExchange, ObeysOldWake, DropsKeptWake, EndsAlone, IgnoresLoss]


@pytest.mark.parametrize("fault", [*FAULTS, "counts in another order"])
def test_a_fault_is_noticed(fault: type[Unison] | str) -> None:
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(300):
            if isinstance(fault, str):
                SimulatedUnit(seed, turned=True).run()
            else:
                SimulatedUnit(seed, fault).run()
