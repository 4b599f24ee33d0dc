"""Tells the log of requests that were turned away, at a rate that no client can raise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 10.0

log = logging.getLogger(__name__)


class RefusalLog:
    """One line for the first, then one each `PERIOD_S` for all others, with their number and the last one's reason."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()
        self._num_untold = 0
        self._last = ""

    def note(self, address: str, why: str) -> None:
        """`why` has nothing of the request in it."""
        self._num_untold += 1
        self._last = f"{address or 'a local socket'}: {why}"
        self.tell()

    def tell(self) -> None:
        """Writes what has not been told, if it is time."""
        if not self._num_untold or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + PERIOD_S
        others = f" ({self._num_untold} since the last such line)" if self._num_untold > 1 else ""
        log.warning("turned away: %s%s", self._last, others)
        self._num_untold = 0
