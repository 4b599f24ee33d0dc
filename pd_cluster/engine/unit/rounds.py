"""A unit's rounds in the engine: the stage that hears the mates, and what a step does before and behind its rows.

On the engine's thread. `Unison` decides, `AnyUnitGroup` exchanges, `Mates` send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pd_cluster import wire
from pd_cluster.engine.drain import WorkerDrain
from pd_cluster.engine.handover.events import Event, StartDrain
from pd_cluster.engine.legs import Legs
from pd_cluster.engine.stage import Stage
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.unison import Unison
from pd_cluster.engine.unit.mates import Mates
from pd_cluster.engine.unit.meet import AnyUnitGroup


class UnitRunner(Protocol):
    """The part of the runner that takes part in rounds, on all ranks of the instance."""

    def expect(self, rows: Sequence[int]) -> None:
        """Says how many rows each member of the unit has in the next step."""

    def take_part(self) -> None:
        """Computes this instance's experts for the others' rows; it has none itself."""


class UnitRounds(Stage):
    """The stage of a worker in a unit. `report` takes events to the loop."""

    def __init__(
        self,
        mates: Mates,
        group: AnyUnitGroup,
        runner: UnitRunner,
        legs: Legs,
        drain: WorkerDrain,
        report: Callable[[Event], None],
    ) -> None:
        self.unison = Unison(group.rank, group.size, mates.send)
        self._mates, self._group, self._runner, self._legs = mates, group, runner, legs
        self._drain, self._report = drain, report
        self._is_owed = False  # a part in the experts' exchange, without rows

    # ---- a step

    def begin(self, plan: StepPlan) -> None:
        """Agrees with the mates on a round, if there is one; `plan` is as it will be computed."""
        rows = sum(num_tokens + len(plan.drafts.get(request, ())) for request, num_tokens in plan.chunks)
        self._is_owed = False
        if not self.unison.enters(rows > 0):
            return
        found = self._group.agree(rows)
        if self.unison.agreed(found):
            self._runner.expect(found)
            self._is_owed = not rows

    def end(self) -> bool:
        """Takes part in a round in which others alone have rows. Returns whether the next round begins at once."""
        if self._is_owed:
            self._is_owed = False
            self._runner.take_part()
        return not self.unison.is_asleep

    # ---- the stage

    def read(self, conn: str, body: wire.Body, is_scheduler: bool) -> bool:
        if not isinstance(body, wire.UnitWake | wire.UnitDrain | wire.UnitDone):
            return False
        if (rank := self._mates.rank_of(conn)) is not None:
            self.unison.heard(rank, body)
            if self.unison.is_draining and not self._drain.has_begun:
                self._report(StartDrain())
        return True

    def tick(self) -> None:
        if self._drain.has_begun:
            self.unison.drain()

    def release_all(self) -> None:
        if self._legs.are_over and self._drain.is_heard:  # before, a scheduler may still come and send requests
            self.unison.drain()
            self.unison.done()

    @property
    def is_over(self) -> bool:
        return self.unison.may_end

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        return msgspec.structs.replace(
            load,
            num_rounds=self.unison.num_rounds,
            num_idle_rounds=self.unison.num_idle_rounds,
            exchange_s=self._group.exchange_s,
        )
