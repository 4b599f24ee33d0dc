"""The parts of a worker that its links, transfers and legs share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.engine.handover.links.link_ends import LaneEnds, LocalEndpoint, Post
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.leg_trace import Tracer
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Note


@dataclass(frozen=True, slots=True)
class HandoverContext:
    """Shared by links, transfers and legs. `report` passes an event from another thread to the engine's thread."""

    endpoint: LocalEndpoint
    post: Post
    ends: LaneEnds
    report: Callable[[Event], None]
    timeouts: Timeouts
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = field(default_factory=Tracer)
    kv_open_links: int = 0
    pulls_prefixes: bool = False  # prefill instances have links to each other
    max_quarantined_share: float = 1.0  # of a pool's blocks

    @property
    def note(self) -> Note:
        return self.tracer.note

    @property
    def terms(self) -> TransferTerms:
        return TransferTerms(self.clock, self.timeouts, self.note)
