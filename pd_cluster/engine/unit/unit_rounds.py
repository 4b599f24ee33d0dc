"""A unit's rounds in the engine: a stage that handles members' messages, and the exchanges before and after a step.

Runs on the engine's thread. `RoundSync` decides, `AnyUnitGroup` exchanges, `MemberConnections` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event, StartDrain
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.engine.unit.member_connections import MemberConnections
from pd_cluster.engine.unit.round_sync import RoundSync
from pd_cluster.engine.unit.unit_meeting import AnyUnitGroup


class UnitRunner(Protocol):
    """The part of the runner that rounds need. It acts on all ranks of the instance."""

    def expect(self, rows: Sequence[int]) -> None:
        """Sets how many rows each member of the unit has in the next step."""

    def take_part(self) -> None:
        """Computes this instance's experts for other members' rows, in a step in which it has no rows of its own."""


class UnitRounds(Stage):
    """The stage of a worker that is in a unit. `report` passes events to the loop."""

    def __init__(
        self,
        mates: MemberConnections,
        group: AnyUnitGroup,
        runner: UnitRunner,
        legs: Legs,
        drain: WorkerDrain,
        report: Callable[[Event], None],
    ) -> None:
        self.round_sync = RoundSync(group.rank, group.size, mates.send)
        self._mates, self._group, self._runner, self._legs = mates, group, runner, legs
        self._drain, self._report = drain, report
        self._is_owed = False  # this instance must take part in the exchange of the experts, without rows of its own

    # ---- steps

    def begin(self, plan: StepPlan) -> None:
        """Agrees with the other members on a round, if this one is in a round. `plan` must be final."""
        rows = sum(num_tokens + len(plan.drafts.get(request, ())) for request, num_tokens in plan.chunks)
        self._is_owed = False
        if not self.round_sync.enters(rows > 0):
            return
        found = self._group.agree(rows)
        if self.round_sync.agreed(found):
            self._runner.expect(found)
            self._is_owed = not rows

    def end(self) -> bool:
        """Takes part in the round if only others have rows in it. Returns whether the next round begins at once."""
        if self._is_owed:
            self._is_owed = False
            self._runner.take_part()
        return not self.round_sync.is_asleep

    # ---- the stage

    def read(self, conn: str, body: wire.Body, is_scheduler: bool) -> bool:
        if not isinstance(body, wire.UnitWake | wire.UnitDrain | wire.UnitDone):
            return False
        if (rank := self._mates.rank_of(conn)) is not None:
            self.round_sync.heard(rank, body)
            if self.round_sync.is_draining and not self._drain.has_begun:
                self._report(StartDrain())
        return True

    def tick(self) -> None:
        if self._drain.has_begun:
            self.round_sync.drain()

    def release_all(self) -> None:
        if self._legs.are_over and self._drain.is_heard:  # before that, a scheduler may still connect and send requests
            self.round_sync.drain()
            self.round_sync.done()

    @property
    def is_over(self) -> bool:
        return self.round_sync.may_end

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        return msgspec.structs.replace(
            load,
            num_rounds=self.round_sync.num_rounds,
            num_idle_rounds=self.round_sync.num_idle_rounds,
            exchange_s=self._group.exchange_s,
        )
