"""Schedules events in simulated time. Events at the same time happen in the order in which they were scheduled."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

from pd_cluster.simulate.virtual_time_loop import RESOLUTION_S, VirtualTimeLoop


class Agenda:
    """Uses one timer of the event loop for all events, because asyncio does not order timers of equal times."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop, self.clock = loop, loop.clock
        self._order = itertools.count()
        self._planned: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self.now: Callable[[], float] = loop.time

    def at(self, when_s: float, do: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._planned, (when_s, next(self._order), do, args))
        if when_s < self._due_s:
            self._arm(when_s)

    def after(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self._loop.time() + seconds, do, *args)

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = when_s, self._loop.call_at(when_s, self._fire)

    def _fire(self) -> None:
        planned, loop, clock = self._planned, self._loop, self.clock
        self._due_s, self._timer = -math.inf, None  # the loop below also handles events that handlers schedule
        while planned and (planned[0][0] <= clock.now_s + RESOLUTION_S or loop.jump(planned[0][0])):
            _, _, do, args = heapq.heappop(planned)
            do(*args)
        self._due_s = math.inf
        if planned:
            self._arm(planned[0][0])
