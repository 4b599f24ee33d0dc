"""When all lanes of a link have said of a transfer what each of them says for itself. Pure; no threads, no sockets."""

from __future__ import annotations

from collections import defaultdict

from pd_cluster.transport.events import Drained, Landed, LandFault, LinkEvent, LinkFailed


class Gather:
    """A transfer has landed, or is drained, when it has in every lane; one lane's fault is the transfer's.

    Each lane says `Landed` or `LandFault` before `Drained`, and nothing of the transfer after that.
    """

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._landed: defaultdict[str, dict[int, Landed]] = defaultdict(dict)
        self._drained: defaultdict[str, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        """Transfers that it still waits for."""
        return len(self._landed.keys() | self._drained.keys())

    def add(self, lane: int, event: LinkEvent) -> LinkEvent | None:
        """What follows for the whole link."""
        match event:
            case LinkFailed() | LandFault():
                return event
            case Landed(transfer_id):
                landed = self._landed[transfer_id]
                landed[lane] = event
                if len(landed) < self._num_lanes:
                    return None
                del self._landed[transfer_id]
                if len({tuple(token.token_id for token in each.first_tokens) for each in landed.values()}) > 1:
                    return LandFault(transfer_id, "the lanes of the link do not agree about the first tokens")
                nbytes = sum(each.nbytes for each in landed.values())
                return Landed(transfer_id, landed[0].first_tokens, nbytes)
            case Drained(transfer_id):
                self._drained[transfer_id].add(lane)
                if len(self._drained[transfer_id]) < self._num_lanes:
                    return None
                del self._drained[transfer_id]
                self._landed.pop(transfer_id, None)
                return event
