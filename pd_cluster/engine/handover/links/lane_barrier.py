"""Determines when all lanes of a link have reported the same event of a transfer. Any thread may report."""

from __future__ import annotations

import threading
from collections import defaultdict

from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault, LinkEvent, LinkFailed


class LaneBarrier:
    """A transfer has arrived, landed or drained once all lanes have reported so. It fails if one lane reports a fault.

    For each transfer, a lane may report `Arrived`, then `Landed` or `LandFault`, then `Drained`, and then nothing more.
    """

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._lock = threading.Lock()
        self._landed: defaultdict[str, dict[int, Landed]] = defaultdict(dict)
        self._arrived: defaultdict[str, set[int]] = defaultdict(set)
        self._drained: defaultdict[str, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        """Returns how many transfers are incomplete."""
        return len(self._arrived.keys() | self._landed.keys() | self._drained.keys())

    def add(self, lane: int, event: LinkEvent) -> LinkEvent | None:
        """Returns the event of the whole link if this lane's report completes it."""
        with self._lock:
            return self._add(lane, event)

    def _add(self, lane: int, event: LinkEvent) -> LinkEvent | None:
        match event:
            case LinkFailed() | LandFault():
                return event
            case Arrived(transfer_id):
                return self._last(self._arrived, lane, event, transfer_id)
            case Landed(transfer_id):
                landed = self._landed[transfer_id]
                landed[lane] = event
                if len(landed) < self._num_lanes:
                    return None
                del self._landed[transfer_id]
                if len({tuple(token.token_id for token in each.first_tokens) for each in landed.values()}) > 1:
                    return LandFault(transfer_id, "the lanes of the link do not agree on the first tokens")
                nbytes = sum(each.nbytes for each in landed.values())
                return Landed(transfer_id, landed[0].first_tokens, nbytes)
            case Drained(transfer_id):
                whole = self._last(self._drained, lane, event, transfer_id)
                if whole is not None:
                    self._arrived.pop(transfer_id, None)
                    self._landed.pop(transfer_id, None)
                return whole

    def _last(
        self, reported: defaultdict[str, set[int]], lane: int, event: LinkEvent, transfer_id: str
    ) -> LinkEvent | None:
        """Returns the event if this lane is the last one to report it."""
        reported[transfer_id].add(lane)
        if len(reported[transfer_id]) < self._num_lanes:
            return None
        del reported[transfer_id]
        return event
