"""Observes the cluster once a second and whenever an instance changes, and keeps the recent past.

Runs in the scheduler even without viewers, because people who look later need to know what happened before. One
observation costs a copy of the counters. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pd_cluster.cluster.instances.roster import Roster
from pd_cluster.cluster.overview.cluster_event_log import ClusterEventLog
from pd_cluster.cluster.overview.cluster_problems import Problem, problems_of
from pd_cluster.cluster.overview.request_history import NUM_SAMPLES, RequestHistory
from pd_cluster.cluster.roles.auto_role import Decision, Flip
from pd_cluster.process_messages import Busy, Stats
from pd_cluster.settings.routing_settings import RoutingConfig

PERIOD_S = 1.0
LEAST_PERIOD_S = 0.1  # the least time between two observations of instances: each heartbeat is a change

Figures = Callable[[], tuple[Stats, Busy]]


class Overview:
    """`figures`: counters of all processes that serve requests, and their current work."""

    def __init__(
        self,
        roster: Roster,
        figures: Figures,
        routing: RoutingConfig,
        scheduler: Callable[[], dict[str, Any]] = dict,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scheduler`: with several schedulers, returns this one's name and the owner of membership."""
        self._roster, self._figures, self._routing, self._scheduler = roster, figures, routing, scheduler
        self._wall, self._clock = wall, clock
        self._history, self._marks = RequestHistory(), ClusterEventLog()
        self._decision: Decision | None = None
        self._started_s = wall()

    async def run(self) -> None:
        """Runs until cancelled."""
        next_s = self._clock()
        while True:
            changed = asyncio.ensure_future(self._roster.change())
            try:
                self.look()
                if self._clock() >= next_s:
                    self.note()
                    next_s = max(next_s + PERIOD_S, self._clock())
                await asyncio.sleep(LEAST_PERIOD_S)
                await asyncio.wait({changed}, timeout=max(0.0, next_s - self._clock()))
            finally:
                changed.cancel()

    def look(self) -> None:
        """Logs changes of the instances."""
        self._marks.look(self._wall(), self._roster.instances)

    def note(self) -> None:
        """Records the counters."""
        stats, busy = self._figures()
        self._history.note(self._wall(), self._clock(), stats, busy.num_streams, busy.num_waiting)

    def considered_roles(self, decision: Decision | None, flip: Flip | None) -> None:
        """Records a decision of --auto-role, and the change that it made."""
        self._decision = decision
        if flip is not None:
            self._marks.add(self._wall(), "change", flip.name, f"becomes {flip.role} by --auto-role", flip.why)

    def to_json(self, since_s: float, since_mark: int) -> dict[str, Any]:
        """Returns everything except the instances: samples after `since_s` (Unix time), events numbered above
        `since_mark`.
        """
        return {
            **self._counts(since_s),
            "scheduler": self._scheduler() or None,
            "roles": self._decision and {"verdict": self._decision.verdict, "why": self._decision.why},
            "problems": [problem.to_json() for problem in self._problems()],
            "marks": [mark.to_json() for mark in self._marks.since(since_mark)],
        }

    def to_public(self, since_s: float, since_mark: int) -> dict[str, Any]:
        """Returns the same without reasons and remedies, which are for operators."""
        return {
            **self._counts(since_s),
            "problems": [problem.to_public() for problem in self._problems()],
            "marks": [mark.to_public() for mark in self._marks.since(since_mark)],
        }

    def _problems(self) -> list[Problem]:
        return problems_of(self._roster.instances, self._history, self._routing)

    def _counts(self, since_s: float) -> dict[str, Any]:
        stats, busy = self._figures()
        return {
            "now_s": round(self._wall(), 3),
            "started_s": round(self._started_s, 3),
            "max_samples": NUM_SAMPLES,
            "num_running": busy.num_streams,
            "num_queued": busy.num_waiting,
            "totals": {name: stats.counters.get(name, 0) for name in ("prompt_tokens", "generation_tokens")},
            "slo_ttft_s": self._routing.slo_ttft_s or None,
            "slo_tpot_s": self._routing.slo_tpot_s or None,
            "samples": self._history.samples(since_s),
        }
