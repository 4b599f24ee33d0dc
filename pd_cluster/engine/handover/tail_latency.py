"""Measures the tail of a transfer: the time from the arrival of its whole KV cache until its first token has landed.

Prefill computes the first token during that time. The links' threads record arrivals, also during a step; the engine's
thread reads the estimates.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault, LinkEvent

KEPT = 0.8  # the weight of the earlier average when a further tail is measured


class TailLatency:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived_s: dict[str, float] = {}  # transfer -> when its whole KV cache had arrived; removed when it lands
        self._tail_s = 0.0  # recent average; 0: unknown

    def __len__(self) -> int:
        return len(self._arrived_s)

    def note(self, event: LinkEvent) -> None:
        """Records an event of a transfer; any thread may call it."""
        match event:
            case Arrived(transfer_id):
                self._arrived_s[transfer_id] = self._clock()
            case Landed(transfer_id):
                if (arrived_s := self._arrived_s.pop(transfer_id, None)) is not None:
                    took_s = self._clock() - arrived_s
                    self._tail_s = KEPT * self._tail_s + (1 - KEPT) * took_s if self._tail_s else took_s
            case LandFault(transfer_id) | Drained(transfer_id):
                self._arrived_s.pop(transfer_id, None)

    def left_s(self, transfer_id: str) -> float:
        """Returns the expected time until a transfer ends; 0: it has ended, or the time is unknown."""
        arrived_s = self._arrived_s.get(transfer_id)
        return 0.0 if arrived_s is None else max(0.0, arrived_s + self._tail_s - self._clock())
