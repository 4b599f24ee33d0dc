"""Stages, which can hold a leg before it enters the engine, or observe the engine.

The worker calls its stages in order, and knows the class of only one, UnitRounds. Stages for adapters, tiers below host
memory, encoders and pulls hold legs; stages that report the prefix cache only observe. docs/protocol/requests.md says
when a leg is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.engine.legs.held_legs import HeldLeg
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.engine_weights import EngineWeights
from pd_cluster.types import LinkState, Tier


@dataclass(frozen=True, slots=True)
class Released:
    """A leg that a stage no longer holds. `why`: why another instance should take it. `error`: why it ends."""

    conn: str
    submit: wire.Submit
    why: str = ""
    error: str = ""


class Stage:
    """The default stage, which does nothing.

    Stages override the methods that they need. All methods except `meet` and `at_once` run on the engine's thread.
    """

    # ---- legs

    @property
    def num_held(self) -> int:
        """Counts held legs that count toward this worker's limit of waiting legs."""
        return 0

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        """Whether a leg may pass. If not, the stage holds it, and `released` returns it later."""
        return True

    def released(self) -> Sequence[Released]:
        """Removes and returns legs that are no longer held."""
        return ()

    def release_all(self) -> None:
        """Releases every leg, because the worker accepts no more legs."""

    def abort(self, conn: str, abort: wire.Abort) -> None:
        """Forgets a held leg that its client no longer needs."""

    # ---- connections and messages

    def opened(self, conn: str, is_scheduler: bool) -> None: ...

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        """Called when a connection is gone; if it was a scheduler's, its legs are no longer needed."""

    def set_peers(self, peers: list[wire.PeerInfo], is_prefill: bool) -> None:
        """Sets the list of live instances and this worker's own role."""

    def read(self, conn: str, body: wire.Body, is_scheduler: bool) -> bool:
        """Handles a message of the stage's own kinds; returns False for other messages."""
        return False

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Passes on a value from the other end of a link.

        Runs on the mailbox's thread, because this end may wait for it.
        """

    def at_once(self, conn: str, body: wire.Body) -> None:
        """Handles a scheduler's message that must not wait for a step. Runs on the mailbox's thread."""

    def handle(self, event: Event) -> bool:
        """Handles an event of the stage's own threads; returns False for other events."""
        return False

    # ---- the engine

    def tick(self) -> None:
        """Does periodic work; the worker calls it several times a second."""

    def blocks_changed(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Called several times a second with the contents whose tier has changed; None: no tier has them any more."""

    def moved(self) -> None:
        """Called when a copy of blocks between device and host has ended."""

    def cache_reset(self, is_external: bool) -> None:
        """Forgets cached KV; with `is_external`, also KV that is shared with other instances."""

    def links(self) -> Mapping[str, LinkState]:
        """Returns the states of the stage's own links, by peer."""
        return {}

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        """Returns the load with this stage's figures. `schedulers`: names of schedulers by connection."""
        return load

    @property
    def is_over(self) -> bool:
        """Whether this stage has no work left, once every leg has ended."""
        return True

    def close(self) -> None: ...


class StageChain:
    """Passes legs through the stages into the engine."""

    def __init__(self, stages: Sequence[Stage], legs: Legs, weights: EngineWeights) -> None:
        self.stages, self._legs, self._weights = stages, legs, weights

    @property
    def num_held(self) -> int:
        return sum(stage.num_held for stage in self.stages)

    def enter(self, conn: str, submit: wire.Submit, closed: str, first: int = 0) -> None:
        """Begins a leg unless a stage from `first` on holds it. `closed`: why another instance should take it."""
        if not closed and (why := self._weights.refusal(submit.weights_epoch)):  # the scheduler soon learns the epoch
            self._legs.end_unbegun(conn, submit, why, is_full=True)
            return
        for stage in self.stages[first:]:
            if closed or self._legs.would_refuse(submit, self.num_held):
                break
            if not stage.admits(conn, submit):
                return
        self._legs.submit(conn, submit, closed, self.num_held)

    def pass_on(self, closed: str) -> None:
        """Passes the legs that stages have released to the next stages."""
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
    """Returns the load's outstanding tokens by scheduler, plus the weights of the legs that a stage holds."""
    outstanding = dict(load.outstanding)
    for leg in held:
        if (name := schedulers.get(leg.conn, "")) in outstanding:
            outstanding[name] += leg.submit.weight
    return outstanding
