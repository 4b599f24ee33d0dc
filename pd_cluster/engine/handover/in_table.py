"""The open links of a worker from prefill instances, as transfers use them: shared by Imports and InLinks.

Knows nothing of how a link opens, rests or closes.
"""

from __future__ import annotations

from pd_cluster.engine.handover.context import HandoverContext
from pd_cluster.engine.handover.links import PeerProgress, ReceiveEnd
from pd_cluster.engine.handover.pairs import LinkPlaces
from pd_cluster.engine.handover.tails import Tails
from pd_cluster.transport.events import Drained


class InLanes:
    """Satisfies imports.ImportPorts."""

    def __init__(self, context: HandoverContext, progress: PeerProgress) -> None:
        self.send, self.report = context.post.send, context.report
        self.progress = progress
        self.tails, self.places = Tails(context.clock), LinkPlaces(context.kv_open_links)
        self.ends: dict[str, list[ReceiveEnd]] = {}  # by connection; also read by other threads
        self.link_ids: dict[str, str] = {}  # by connection
        self._closed_nbytes = self._closed_dropped = 0  # received over links that are gone

    @property
    def received_nbytes(self) -> int:
        return self._closed_nbytes + sum(map(_received_nbytes, list(self.ends.values())))

    @property
    def num_dropped(self) -> int:
        """Counts KV frames that were not part of their link."""
        return self._closed_dropped + sum(map(_num_dropped, list(self.ends.values())))

    def is_open(self, conn: str) -> bool:
        return conn in self.ends

    def remove(self, conn: str) -> None:
        """Closes this end of all lanes of a connection, if there are any."""
        ends = self.ends.pop(conn, None)
        if ends is not None:
            del self.link_ids[conn]
            self._closed_nbytes += _received_nbytes(ends)
            self._closed_dropped += _num_dropped(ends)
            for end in ends:
                end.close()
        self.progress.forget(conn)

    def precision(self, conn: str) -> str:
        ends = self.ends.get(conn)
        return ends[0].precision if ends else ""  # the first lane's end is in this process, and all lanes are alike

    def begin(self, conn: str, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int) -> None:
        """Names the same blocks to every rank."""
        self.places.use(conn)
        for end in self.ends.get(conn, []):
            end.begin(transfer_id, block_ids, first_token, num_tokens)

    def forget(self, conn: str, transfer_id: str) -> None:
        ends = self.ends.get(conn)
        if not ends:
            self.tails.note(Drained(transfer_id))
            self.report(Drained(transfer_id))
        else:
            for end in ends:
                end.forget(transfer_id)

    def left_s(self, transfer_id: str) -> float:
        return self.tails.left_s(transfer_id)

    def progress_s(self, conn: str) -> float:
        ends = self.ends.get(conn)
        if ends:
            self.progress.moved(conn, _received_nbytes(ends))
        return self.progress.at_s(conn)


def _received_nbytes(ends: list[ReceiveEnd]) -> int:
    return sum(end.received_nbytes for end in ends)


def _num_dropped(ends: list[ReceiveEnd]) -> int:
    return sum(end.num_dropped for end in ends)
