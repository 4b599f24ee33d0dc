"""The rounds of a unit: each message's effect, and a simulation of 2 to 8 members in random orders of events."""

from __future__ import annotations

import pytest

from pd_cluster import wire
from pd_cluster.engine.unit.round_sync import RoundSync
from pd_cluster.errors import InstanceLost
from tests.support.unit_world import SimulatedUnit

NUM_ORDERS = 10_000
IDLE = [0, 0]


def two_members() -> tuple[RoundSync, list[wire.Body]]:
    sent: list[wire.Body] = []
    return RoundSync(0, 2, sent.append), sent


def test_a_member_sleeps_until_it_or_a_mate_has_work() -> None:
    round_sync, sent = two_members()
    assert not round_sync.enters(has_work=False)
    round_sync.heard(1, wire.UnitWake(0))
    assert not round_sync.is_asleep
    assert round_sync.enters(has_work=True)  # the waking member has told all others
    assert sent == []
    assert round_sync.agreed([3, 1])
    assert round_sync.agreed([0, 1])
    assert not round_sync.is_asleep
    assert not round_sync.agreed(IDLE)
    assert round_sync.is_asleep
    round_sync.heard(1, wire.UnitWake(2))  # for a round that is over
    assert not round_sync.enters(has_work=False)
    assert round_sync.enters(has_work=True)
    assert sent == [wire.UnitWake(3)]
    assert (round_sync.round, round_sync.num_rounds, round_sync.num_idle_rounds) == (3, 3, 2)


def test_a_wake_that_overtakes_the_counts_is_kept() -> None:
    round_sync, sent = two_members()
    assert round_sync.enters(has_work=True)
    round_sync.heard(1, wire.UnitWake(1))
    assert not round_sync.agreed(IDLE)
    assert round_sync.enters(has_work=False)
    assert sent == [wire.UnitWake(0)]
    with pytest.raises(InstanceLost, match=r"member 1 .* round 3, but member 0 is in round 1: they are out of step"):
        round_sync.heard(1, wire.UnitWake(3))
    assert not round_sync.agreed(IDLE)
    with pytest.raises(InstanceLost, match="is asleep before round 2"):
        round_sync.heard(1, wire.UnitWake(3))


def test_a_unit_drains_and_ends_together() -> None:
    round_sync, sent = two_members()
    with pytest.raises(InstanceLost, match="decode-3, member 1 of 2 of this unit, is lost: silence"):
        round_sync.lost(1, "decode-3", "silence")
    round_sync.drain()
    round_sync.drain()
    round_sync.done()
    round_sync.done()
    assert sent == [wire.UnitDrain(), wire.UnitDone()]
    with pytest.raises(InstanceLost):
        round_sync.lost(1, "decode-3", "silence")
    round_sync.heard(1, wire.UnitWake(0))
    round_sync.heard(1, wire.UnitDone())
    assert not round_sync.may_end  # during a round
    assert round_sync.enters(has_work=False)
    assert not round_sync.agreed(IDLE)
    assert round_sync.may_end
    round_sync.lost(1, "decode-3", "end of file")
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


class SkipsExchange(RoundSync):
    """A faulty policy: once, without rows, it enters the next round without the other members."""

    has_skipped = False

    def enters(self, has_work: bool) -> bool:
        if super().enters(has_work) and not has_work and not self.has_skipped:
            self.has_skipped = True
            self.agreed([1] * self._size)
        return not self.is_asleep


class ObeysOldWake(RoundSync):
    def heard(self, rank: int, message: wire.UnitWake | wire.UnitDrain | wire.UnitDone) -> None:
        is_old = isinstance(message, wire.UnitWake) and self.is_asleep
        super().heard(rank, wire.UnitWake(self.round) if is_old else message)


class DropsKeptWake(RoundSync):
    def heard(self, rank: int, message: wire.UnitWake | wire.UnitDrain | wire.UnitDone) -> None:
        if not isinstance(message, wire.UnitWake) or self.is_asleep:
            super().heard(rank, message)


class EndsAlone(RoundSync):
    @property
    def may_end(self) -> bool:
        return self.is_asleep and self._rank in self._done


class IgnoresLoss(RoundSync):
    def lost(self, rank: int, mate: str, reason: str) -> None:
        pass


FAULTS = [SkipsExchange, ObeysOldWake, DropsKeptWake, EndsAlone, IgnoresLoss]


@pytest.mark.parametrize("fault", [*FAULTS, "counts in another order"])
def test_a_fault_is_noticed(fault: type[RoundSync] | str) -> None:
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(300):
            if isinstance(fault, str):
                SimulatedUnit(seed, turned=True).run()
            else:
                SimulatedUnit(seed, fault).run()
