"""Holds a leg until the cached blocks of its prompt are loaded from the tiers below host memory into host memory.

A leg begins without them if loading takes longer than computing would. docs/protocol/handover.md has the table. Knows
nothing of files or stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.engine.legs.held_legs import HeldLeg, with_rest
from pd_cluster.engine.legs.legs import request_of
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.stages.stage import Released, Stage, outstanding_with
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.tier_commands import AnyTierCommand, LowerKind, TierContents, TierDone
from pd_cluster.types import Leg

MIN_WAIT_S, MAX_WAIT_S = 0.1, 5.0  # bounds of the time for which a leg waits for its blocks
HASH_NBYTES = 32

At = tuple[LowerKind, int]  # a job


class TierCommandRunner(Protocol):
    """Executes commands on every rank. Implementations: ModelRunner; LeadRunner for several ranks."""

    def order(self, kind: LowerKind, orders: Sequence[AnyTierCommand]) -> None: ...

    def close_tiers(self) -> None: ...


@dataclass(slots=True)
class _Held:
    leg: HeldLeg
    until_s: float
    jobs: set[At]
    hashes: Sequence[bytes]  # the hashes of its prompt's blocks


class EngineTiers(Stage):
    """The stage for tiers below host memory. `lower`: these tiers, in the order in which they are searched."""

    def __init__(
        self,
        scheduler: StepScheduler,
        lower: Mapping[LowerKind, LowerTier],
        orders: TierCommandRunner | None,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._lower, self._orders, self._clock = scheduler, lower, orders, clock
        self._held: list[_Held] = []
        self._released: list[Released] = []
        self.num_late = 0  # legs that began without the blocks that they had waited for

    def of(self, kind: LowerKind) -> LowerTier | None:
        return self._lower.get(kind)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        if not self._held:
            return load
        outstanding = outstanding_with(load, [held.leg for held in self._held], schedulers)
        num_waiting = load.num_waiting + len(self._held)
        return msgspec.structs.replace(load, num_waiting=num_waiting, outstanding=outstanding)

    # ---- legs

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        if not self._lower or self._scheduler.blocks.tier is None:
            return True
        now_s = self._clock()
        request = request_of(submit, conn, now_s)
        hashes = self._scheduler.prompt_hashes(request)
        jobs, num_blocks = self._bring(hashes, request.leg)
        self.flush()
        if not jobs:
            return True
        computing_s = max(each.cost.compute_s(num_blocks) for each in self._lower.values())
        wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, computing_s)) if computing_s else MAX_WAIT_S
        expires_s = now_s + submit.deadline_s if submit.deadline_s else math.inf
        held = HeldLeg(conn, submit, expires_s)
        self._held.append(_Held(held, min(now_s + wait_s, expires_s), jobs, hashes))
        return False

    def _bring(self, hashes: Sequence[bytes], leg: Leg) -> tuple[set[At], int]:
        """Begins to load the blocks of a prompt's beginning that are neither on the device nor in host memory.

        Returns the jobs to wait for, and the number of blocks that they load.
        """
        blocks, host = self._scheduler.blocks, self._scheduler.blocks.tier
        assert host is not None
        self._touch(hashes)
        lacking = [each for each in hashes if each not in blocks and each not in host]
        jobs: set[At] = set()
        num_blocks = 0
        for kind, lower in self._lower.items():
            if not lacking or not lower.cost.is_worth_it():
                continue
            if lower.is_asked:
                jobs.add((kind, lower.look(lacking)))
                num_blocks += len(lacking)
                break
            here = 0
            while here < len(lacking) and lacking[here] in lower:
                here += 1
            jobs |= {(kind, job) for job in lower.fetch(lacking[:here])}
            num_blocks += here
            lacking = lacking[here:]
        return jobs, num_blocks

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Marks the prompt's blocks in host memory as used, so that loads do not evict them."""
        blocks = self._scheduler.blocks
        if blocks.tier is not None:
            blocks.tier.touch([each for each in hashes if each not in blocks])  # blocks on the device need no copy

    def abort(self, conn: str, abort: wire.Abort) -> None:
        key, is_whole = (conn, abort.request_id, abort.attempt), abort.index == -1
        self._held = [
            held
            for held in self._held
            if held.leg.key != key or not (is_whole or held.leg.submit.order.sampling.n == 1)
        ]

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        self._held = [held for held in self._held if held.leg.conn != conn]

    def release_all(self) -> None:
        self._release(lambda held: True)

    def _release(self, wanted: Callable[[_Held], bool]) -> None:
        released = [held for held in self._held if wanted(held)]
        self._held = [held for held in self._held if held not in released]
        for held in released:
            leg = with_rest(held.leg, self._clock())
            self._released.append(Released(leg.conn, leg.submit))

    def released(self) -> list[Released]:
        released, self._released = self._released, []
        return released

    # ---- reports and time

    def handle(self, event: Event) -> bool:
        match event:
            case TierDone():
                self._done(event)
            case TierContents():
                self._opened(event)
            case _:
                return False
        return True

    def _opened(self, contents: TierContents) -> None:
        joined = contents.contents
        hashes = [joined[at : at + HASH_NBYTES] for at in range(0, len(joined), HASH_NBYTES)]
        self._lower[contents.kind].opened(contents.rank, hashes)
        self.flush()

    def _done(self, report: TierDone) -> None:
        lower = self._lower[report.kind]
        found, is_over = lower.done(report)
        if is_over:
            at = report.kind, report.job
            waiting = [held for held in self._held if at in held.jobs]
            if found:
                for held in waiting:  # their first blocks may have been evicted in the meantime
                    self._touch(held.hashes)
            more = {(report.kind, job) for job in lower.fetch(found)} if found else set()
            for held in waiting:
                held.jobs.discard(at)
                held.jobs |= more
            self._release(lambda held: not held.jobs)
        self.flush()

    def tick(self) -> None:
        if not self._lower:
            return
        for lower in self._lower.values():
            lower.tick()
        now_s = self._clock()
        before = len(self._held)
        self._release(lambda held: held.until_s < now_s)
        self.num_late += before - len(self._held)

    def moved(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Sends the new commands to the ranks, after all moves so far."""
        for kind, lower in self._lower.items():
            if (orders := lower.take_commands()) and self._orders is not None:
                self._orders.order(kind, orders)

    def cache_reset(self, is_external: bool) -> None:
        """Discards this instance's blocks; with `is_external`, also those that are shared with other instances."""
        for lower in self._lower.values():
            if is_external or not lower.is_asked:
                lower.clear()
        self.flush()

    def close(self) -> None:
        """Writes the queued blocks, within a time limit."""
        if self._lower and self._orders is not None:
            self._orders.close_tiers()
