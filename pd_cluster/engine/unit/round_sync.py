"""Keeps the members of a unit in step: tracks their rounds, when all are asleep, and when a member may end.

docs/protocol/membership.md, "Units", has the table.

Knows nothing of requests, of experts, or of how counts are exchanged. It needs no clock: if a message never comes, its
sender is lost, which the caller detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from pd_cluster import wire
from pd_cluster.errors import InstanceLost


def have_ended(done: Set[int], rank: int, own: int) -> bool:
    """Whether another member's connection ended as intended, because both members are done.

    If a member that is done dies while others still need it, the others end. This member then loses them, and ends,
    too.
    """
    return {rank, own} <= done


class RoundSync:
    """One member's rounds. One thread calls all methods.

    In each turn of its loop, the thread handles mail and calls `enters`. If the member is in a round, the thread then
    exchanges its number of rows with the other members, calls `agreed`, and computes. Mail may also be handled during
    the exchange, but the thread waits for mail only while the member `is_asleep`.
    """

    def __init__(self, rank: int, size: int, send: Callable[[wire.Body], None]) -> None:
        """`send` sends a message to all other members of the unit.

        Messages between two members must arrive in order, and none may arrive after their connection is lost.
        """
        self._rank, self._size, self._send = rank, size, send
        self._done: set[int] = set()  # members that have sent `UnitDone`, including this one
        self._woken = -1  # the latest round for which a member has woken the others, or that followed a round with rows
        self.round = 0  # the round in which this member is, or that it enters next
        self.is_draining = False  # if any member drains, the whole unit does
        self.num_rounds = 0
        self.num_idle_rounds = 0  # rounds in which this member had no rows

    @property
    def is_asleep(self) -> bool:
        """Whether this member is in no round and no other member waits for it."""
        return self._woken < self.round

    @property
    def may_end(self) -> bool:
        """Whether no other member needs this one any more, because all are done and this one is asleep."""
        return self.is_asleep and len(self._done) == self._size

    def enters(self, has_work: bool) -> bool:
        """Returns whether this member is in a round now. If it is asleep and has work, wakes itself and the others."""
        if self.is_asleep and has_work:
            assert self._rank not in self._done, "this member has reported that nothing is left"
            self._woken = self.round
            self._send(wire.UnitWake(self.round))
        return not self.is_asleep

    def agreed(self, rows: Sequence[int]) -> bool:
        """Ends the exchange of a round. Returns whether the round must be computed, because some member has rows.

        Afterwards the member is in the next round, or asleep before it. `rows`: the number of rows of each member's
        step, by rank; all members pass the same list.
        """
        assert not self.is_asleep, "a sleeping member takes no part in an exchange"
        assert len(rows) == self._size, f"{len(rows)} counts of {self._size} members"
        self.num_rounds += 1
        self.num_idle_rounds += not rows[self._rank]
        self.round += 1
        has_rows = any(rows)
        if has_rows:
            self._woken = max(self._woken, self.round)
        return has_rows

    def heard(self, rank: int, message: wire.UnitWake | wire.UnitDrain | wire.UnitDone) -> None:
        """Handles another member's message. Raises InstanceLost if the two members' rounds are out of step."""
        match message:
            case wire.UnitWake(number):
                if number > self.round + (not self.is_asleep):  # in a round, others may be one ahead
                    state = "asleep before" if self.is_asleep else "in"
                    raise InstanceLost(
                        f"member {rank} of this unit wakes the others for round {number}, but member {self._rank} is "
                        f"{state} round {self.round}: they are out of step"
                    )
                self._woken = max(self._woken, number)  # a number below `round` has no effect
            case wire.UnitDrain():
                self.is_draining = True
            case wire.UnitDone():
                self.is_draining = True  # some member drains, even if its UnitDrain has not arrived yet
                self._done.add(rank)

    def lost(self, rank: int, mate: str, reason: str) -> None:
        """Handles the end of another member's connection. Raises InstanceLost unless both members are done.

        `mate`: the name of the other member.
        """
        if not have_ended(self._done, rank, self._rank):
            raise InstanceLost(f"{mate}, member {rank} of {self._size} of this unit, is lost: {reason}")

    def drain(self) -> None:
        """Begins to drain, and informs the other members unless the unit already drains."""
        if not self.is_draining:
            self.is_draining = True
            self._send(wire.UnitDrain())

    def done(self) -> None:
        """Reports once that this member has no requests left and accepts no more.

        The member still takes part in rounds.
        """
        assert self.is_draining, "only a draining member can be done"
        if self._rank not in self._done:
            self._done.add(self._rank)
            self._send(wire.UnitDone())
