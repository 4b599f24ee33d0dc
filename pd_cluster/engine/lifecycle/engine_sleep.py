"""A worker's sleep: the level that its scheduler has requested, and the level that the worker has reached.

docs/protocol/membership.md has the state × event table. Does not know what is in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pd_cluster.native.malloc_settings import resident_nbytes
from pd_cluster.wire import SleepLevel

log = logging.getLogger(__name__)
MIB = 1 << 20


class EngineSleep:
    """`go` brings the model and its pool to a level; None: this worker cannot release their memory."""

    def __init__(self, go: Callable[[SleepLevel], None] | None, forget: Callable[[], None]) -> None:
        """`forget` empties the prefix cache."""
        self._go, self._forget = go, forget
        self._requested: SleepLevel = 0
        self.level: SleepLevel = 0  # the level that the worker has reached

    def wish(self, level: SleepLevel) -> None:
        if self._go is None:
            log.warning("a scheduler requests sleep level %d, which only instances on a CPU support", level)
            return
        self._requested = level

    @property
    def is_due(self) -> bool:
        """Whether the requested level is not reached yet. During the change no request may be in progress."""
        return self._requested != self.level

    @property
    def closed(self) -> str:
        """Returns why no request is taken; "" if requests are taken."""
        return "this instance takes no requests, because it sleeps" if self._requested or self.level else ""

    def settle(self) -> None:
        """Changes to the requested level, which may take as long as loading the model. Raises ModelError."""
        assert self._go is not None
        started_s, before = time.monotonic(), resident_nbytes()
        if self._requested:
            self._forget()
        self._go(self._requested)
        self.level = self._requested
        state = f"asleep at level {self.level}" if self.level else "awake"
        took_s, change = time.monotonic() - started_s, (resident_nbytes() - before) / MIB
        log.info("%s after %.2f s: %+.0f MiB resident", state, took_s, change)
