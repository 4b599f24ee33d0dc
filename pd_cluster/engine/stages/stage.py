"""Stages: what can hold a leg on its way into the engine, or follows what the engine does.

The worker walks its stages in order and names none. Adapters, tiers below host memory and encoders hold legs; news of
the prefix cache goes out by stages that only follow. docs/protocol/requests.md says when a leg is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.engine.legs.held_legs import HeldLeg
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.types import LinkState, Tier


@dataclass(frozen=True, slots=True)
class Released:
    """A leg that a stage held. `why`: another instance should take it, for this reason; `error`: it ends with it."""

    conn: str
    submit: wire.Submit
    why: str = ""
    error: str = ""


class Stage:
    """Holds nothing and follows nothing: a stage overrides what concerns it. On the engine's thread, but for `meet`."""

    # ---- legs

    @property
    def num_held(self) -> int:
        """Counts legs that are held and will need room here, as those that wait for a step do."""
        return 0

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        """Whether a leg may pass on; otherwise it is held, and `released` returns it later."""
        return True

    def released(self) -> Sequence[Released]:
        """Takes out the legs that are held no longer."""
        return ()

    def release_all(self) -> None:
        """Releases every leg, because the worker takes nothing more."""

    def abort(self, conn: str, abort: wire.Abort) -> None:
        """Forgets a leg that is held, if its client no longer wants it."""

    # ---- connections and messages

    def opened(self, conn: str, is_scheduler: bool) -> None: ...

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        """A connection is gone, and so is the interest in what its scheduler wanted."""

    def set_peers(self, peers: list[wire.PeerInfo], is_prefill: bool) -> None:
        """Learns which instances are alive, and this worker's own role."""

    def read(self, conn: str, body: wire.Body, is_scheduler: bool) -> bool:
        """Handles a message of the stage's own kinds; False: it is about something else."""
        return False

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Called on the mailbox's thread: the end of a link may wait for it."""

    def handle(self, event: Event) -> bool:
        """Handles an event of the stage's own threads; False: it is about something else."""
        return False

    # ---- the engine

    def tick(self) -> None:
        """Called several times a second."""

    def blocks_changed(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Called several times a second: where contents of the prefix cache have moved; None: they are gone."""

    def moved(self) -> None:
        """Called after every copy of blocks between device and host."""

    def cache_reset(self, is_external: bool) -> None:
        """Forgets cached KV; that which other instances share only if `is_external`."""

    def links(self) -> Mapping[str, LinkState]:
        """Returns the states of the stage's own links, by peer."""
        return {}

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        """Returns the load with the stage's figures. `schedulers`: their names by connection."""
        return load

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for anything of this stage, once every leg has ended."""
        return True

    def close(self) -> None: ...


class StageChain:
    """Takes legs through the stages into the engine."""

    def __init__(self, stages: Sequence[Stage], legs: Legs) -> None:
        self.stages, self._legs = stages, legs

    @property
    def num_held(self) -> int:
        return sum(stage.num_held for stage in self.stages)

    def enter(self, conn: str, submit: wire.Submit, closed: str, first: int = 0) -> None:
        """Begins a leg unless a stage from `first` on holds it. `closed`: why another instance should take it."""
        for stage in self.stages[first:]:
            if closed or self._legs.turns_away(submit, self.num_held):
                break
            if not stage.admits(conn, submit):
                return
        self._legs.submit(conn, submit, closed, self.num_held)

    def pass_on(self, closed: str) -> None:
        """Lets the legs that stages have released enter the stages behind them."""
        for at, stage in enumerate(self.stages, 1):
            for leg in stage.released():
                if leg.error:
                    self._legs.end_unbegun(leg.conn, leg.submit, leg.error)
                else:
                    self.enter(leg.conn, leg.submit, closed or leg.why, at)

    def abort(self, conn: str, abort: wire.Abort) -> None:
        for stage in self.stages:
            stage.abort(conn, abort)
        self._legs.abort(conn, abort)

    def release_all(self, closed: str) -> None:
        for stage in self.stages:
            stage.release_all()
        self.pass_on(closed)


def outstanding_with(load: wire.Load, held: Sequence[HeldLeg], schedulers: Mapping[str, str]) -> dict[str, int]:
    """Returns the load's outstanding tokens by scheduler, with the weights of the legs that a stage holds."""
    outstanding = dict(load.outstanding)
    for leg in held:
        if (name := schedulers.get(leg.conn, "")) in outstanding:
            outstanding[name] += leg.submit.weight
    return outstanding
