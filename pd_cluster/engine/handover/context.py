"""The surroundings that a worker's links, transfers and legs share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster.engine.handover.events import Event
from pd_cluster.engine.handover.links import LaneEnds, Post, Side
from pd_cluster.engine.handover.terms import TransferTerms
from pd_cluster.engine.trace import Tracer
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Note


@dataclass(frozen=True, slots=True)
class HandoverContext:
    """`report` takes events from their threads to the engine's thread."""

    side: Side
    post: Post
    ends: LaneEnds
    report: Callable[[Event], None]
    timeouts: Timeouts
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = field(default_factory=Tracer)
    kv_open_links: int = 0
    max_quarantined_share: float = 1.0  # of a pool's blocks

    @property
    def note(self) -> Note:
        return self.tracer.note

    @property
    def terms(self) -> TransferTerms:
        return TransferTerms(self.clock, self.timeouts, self.note)
