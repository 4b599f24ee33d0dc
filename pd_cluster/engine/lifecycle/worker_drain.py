"""A worker's drain: whether it has begun, and whether others have had time to hear of it. The rules are in
docs/protocol/membership.md, "The end of a process".

Knows nothing of connections or of what is left to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

CLOSES_AFTER_S = 0.5  # in which others hear that a worker drains, and what they sent before arrives; at most


class WorkerDrain:
    def __init__(self, drain_timeout_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._wait_s = min(CLOSES_AFTER_S, drain_timeout_s / 2)
        self._heard_s = math.inf
        self.has_begun = False

    def begin(self) -> None:
        """Begins the drain unless it has begun. The caller lets others hear of it at once."""
        self.has_begun = True
        self._heard_s = min(self._heard_s, self.clock() + self._wait_s)

    @property
    def is_heard(self) -> bool:
        """Whether what others sent before they heard of the drain has arrived."""
        return self.clock() >= self._heard_s
