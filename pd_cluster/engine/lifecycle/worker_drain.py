"""A worker's drain: whether it has begun, and whether all peers have had time to learn of it.

docs/protocol/membership.md, "The end of a process", has the rules. Knows nothing of connections or of remaining work.
"""

from __future__ import annotations

import math
from collections.abc import Callable

CLOSES_AFTER_S = 0.5  # the time in which peers learn of a drain, and messages that they sent before arrive


class WorkerDrain:
    def __init__(self, drain_timeout_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._wait_s = min(CLOSES_AFTER_S, drain_timeout_s / 2)
        self._heard_s = math.inf
        self.has_begun = False

    def begin(self) -> None:
        """Begins the drain unless it has already begun. The caller must inform the peers at once."""
        self.has_begun = True
        self._heard_s = min(self._heard_s, self.clock() + self._wait_s)

    @property
    def is_heard(self) -> bool:
        """Whether all messages have arrived that peers sent before they learned of the drain."""
        return self.clock() >= self._heard_s
