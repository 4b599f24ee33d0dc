"""Keeps the members of a unit in step: the round of each member, when all fall asleep, and when a member may end.

docs/protocol/membership.md, "Units", has the table. Knows nothing of requests, of experts, or of how counts are
exchanged. It needs no clock: a message that never comes means a lost sender, which the caller detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from pd_cluster import wire
from pd_cluster.errors import InstanceLost


def have_ended(done: Set[int], rank: int, own: int) -> bool:
    """Whether another member's connection ended as intended: both members are done.

    If a member dies after it is done, others may still need it; they end, and so does this member.
    """
    return {rank, own} <= done


class RoundSync:
    """One member's rounds, driven by one thread. In a turn it handles mail and calls `enters`.

    In a round it then exchanges the number of its rows with the others, calls `agreed` and computes. Mail may also be
    handled during the exchange, but the member waits for it only while it `is_asleep`.
    """

    def __init__(self, rank: int, size: int, send: Callable[[wire.Body], None]) -> None:
        """`send`: sends a message to all other members of the unit.

        Messages to another member arrive in order, and no message arrives after its connection is lost.
        """
        self._rank, self._size, self._send = rank, size, send
        self._done: set[int] = set()  # members that have sent `UnitDone`, including this one
        self._woken = -1  # the latest round that a member has woken the others for, or that followed a round with rows
        self.round = 0  # the round that it is in, or enters next
        self.is_draining = False  # this or another member drains, and so the whole unit does
        self.num_rounds = 0
        self.num_idle_rounds = 0  # rounds in which this member had no rows

    @property
    def is_asleep(self) -> bool:
        """Whether this member is in no round, and no other member waits for it in the next round."""
        return self._woken < self.round

    @property
    def may_end(self) -> bool:
        """Whether no other member needs this one any more: all are done, so none can be in a round without it."""
        return self.is_asleep and len(self._done) == self._size

    def enters(self, has_work: bool) -> bool:
        """Returns whether this member is in a round now. If it has work and nobody has woken it, wakes the others."""
        if self.is_asleep and has_work:
            assert self._rank not in self._done, "this member has reported that nothing is left"
            self._woken = self.round
            self._send(wire.UnitWake(self.round))
        return not self.is_asleep

    def agreed(self, rows: Sequence[int]) -> bool:
        """Ends the exchange; returns whether the round is computed. The member is then in the next round, or asleep
        before it.

        `rows`: the rows of each member's step, by rank; all members pass the same list.
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
        """Handles another member's message. Raises InstanceLost if that member is in a round that is impossible now."""
        match message:
            case wire.UnitWake(number):
                if number > self.round + (not self.is_asleep):  # in a round, only its exchange can be behind the other
                    state = "asleep before" if self.is_asleep else "in"
                    raise InstanceLost(
                        f"member {rank} of this unit wakes the others for round {number}, but member {self._rank} is "
                        f"{state} round {self.round}: they are out of step"
                    )
                self._woken = max(self._woken, number)  # a number below `round` changes nothing
            case wire.UnitDrain():
                self.is_draining = True
            case wire.UnitDone():
                self.is_draining = True  # a third member has reported it, and its message is on the way
                self._done.add(rank)

    def lost(self, rank: int, mate: str, reason: str) -> None:
        """Handles the end of another member's connection. Raises InstanceLost, unless both members are done.

        `mate`: its name.
        """
        if not have_ended(self._done, rank, self._rank):
            raise InstanceLost(f"{mate}, member {rank} of {self._size} of this unit, is lost: {reason}")

    def drain(self) -> None:
        """Begins to drain, and informs the others unless one of them has informed this member."""
        if not self.is_draining:
            self.is_draining = True
            self._send(wire.UnitDrain())

    def done(self) -> None:
        """Reports, once, that nothing is left and nothing more is accepted. The member still takes part in rounds."""
        assert self.is_draining, "only a draining member can be done"
        if self._rank not in self._done:
            self._done.add(self._rank)
            self._send(wire.UnitDone())
