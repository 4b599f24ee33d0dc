"""Decides when a batch request may begin, so that it hardly delays interactive requests. Pure.

Engines serve interactive requests first, but cannot interrupt a step. So while there are interactive requests, batches
compute prompts for only a small share of the time, however long a prompt takes.
"""

from __future__ import annotations

from typing import NamedTuple

QUIET_S = 5.0  # after this time without interactive requests, batches may use the whole cluster
PAUSE = 4.0  # with interactive requests, a pause follows each batch prompt, this many times as long as the prompt
BATCH_DIVISOR = 4  # while there are interactive requests, batches get at most a quarter of the cluster's sequences
PROMPTS_PER_INSTANCE = 2  # prompts at a time: one being computed, and the next


class ClusterCapacity(NamedTuple):
    """`is_free`: no request waits, and sequences are left. `num_places`: the cluster's sequences; 0: unknown."""

    num_prefills: int
    num_places: int
    is_free: bool


class BatchThrottle:
    """The caller passes the time. A stream is one prompt of a request."""

    def __init__(self, most: int) -> None:
        """`most`: the most batch requests at a time."""
        self._most = most
        self.num_running = 0
        self._num_unsent = 0  # running requests without a stream yet
        self._sent_s: dict[str, float] = {}  # stream without a token -> when it was sent
        self.paused_until_s = 0.0
        self._num_interactive = 0
        self._interactive_s = float("-inf")  # when an interactive request last began or ended

    def may_begin(self, now_s: float, capacity: ClusterCapacity) -> bool:
        if not capacity.is_free or self.num_running >= self._most:
            return False
        num_prompts = self._num_unsent + len(self._sent_s)
        if not self.is_beside_others(now_s):
            return num_prompts < PROMPTS_PER_INSTANCE * max(1, capacity.num_prefills)
        most = max(1, (capacity.num_places or self._most) // BATCH_DIVISOR)
        return not num_prompts and now_s >= self.paused_until_s and self.num_running < most

    def is_beside_others(self, now_s: float) -> bool:
        """Whether there are interactive requests, or were recently."""
        return self._num_interactive > 0 or now_s - self._interactive_s < QUIET_S

    # ---- events of batch requests

    def begins(self) -> None:
        self.num_running += 1
        self._num_unsent += 1

    def ends(self) -> None:
        self.num_running -= 1
        self._num_unsent = min(self._num_unsent, self.num_running)

    def sent(self, stream_id: str, now_s: float) -> None:
        self._num_unsent = max(0, self._num_unsent - 1)
        self._sent_s[stream_id] = now_s

    def has_token(self, stream_id: str, now_s: float) -> None:
        """Records that a stream's prompt was computed, or the stream ended. A second call has no effect."""
        sent_s = self._sent_s.pop(stream_id, None)
        if sent_s is not None:
            self.paused_until_s = now_s + PAUSE * (now_s - sent_s)

    # ---- events of interactive requests

    def interactive_begins(self, now_s: float) -> None:
        self._num_interactive += 1
        self._interactive_s = now_s

    def interactive_ends(self, now_s: float) -> None:
        self._num_interactive -= 1
        self._interactive_s = now_s
