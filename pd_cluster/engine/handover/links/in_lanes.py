"""The open links from prefill instances to this worker; Imports and InLinks share them.

Knows nothing of how a link opens, rests or closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import PeerProgress, ReceiveEnd, joined_precision
from pd_cluster.engine.handover.links.link_limits import InLinkLimit
from pd_cluster.engine.handover.tail_latency import TailLatency
from pd_cluster.transport.link_events import Drained

RECEIVED_NBYTES, NUM_DROPPED = attrgetter("received_nbytes"), attrgetter("num_dropped")


class InLane(NamedTuple):
    """D's end of a lane of a group of layers."""

    group: int
    end: ReceiveEnd


class InLanes:
    """Implements imports.ImportPorts."""

    def __init__(self, context: HandoverContext, progress: PeerProgress) -> None:
        self.send, self.report = context.post.send, context.report
        self.progress = progress
        self.tail_latency, self.limit = TailLatency(context.clock), InLinkLimit(context.kv_open_links)
        self.lanes: dict[str, list[InLane]] = {}  # by connection; other threads also read it
        self.link_ids: dict[str, str] = {}  # by connection
        self.peers: dict[str, str] = {}  # by connection: the name@epoch of the other end
        self._layouts = context.endpoint.layouts
        self._closed_nbytes = self._closed_dropped = 0  # totals of closed links

    def counts(self) -> tuple[int, int]:
        """Returns the bytes received so far, and the number of KV frames that did not belong to their link."""
        ends = [end for lanes in list(self.lanes.values()) for _, end in lanes]
        received_nbytes, num_dropped = sum(map(RECEIVED_NBYTES, ends)), sum(map(NUM_DROPPED, ends))
        return self._closed_nbytes + received_nbytes, self._closed_dropped + num_dropped

    def is_open(self, conn: str) -> bool:
        return conn in self.lanes

    def from_peer(self, peer: str) -> str | None:
        """Returns the connection of an open link from this peer, if there is one."""
        return next((conn for conn, each in self.peers.items() if each == peer), None)

    def remove(self, conn: str) -> None:
        """Closes this end of all lanes of a connection, if any."""
        lanes = self.lanes.pop(conn, None)
        if lanes is not None:
            del self.link_ids[conn], self.peers[conn]
            self._closed_nbytes += _received_nbytes(lanes)
            self._closed_dropped += _num_dropped(lanes)
            for each in lanes:
                each.end.close()
        self.progress.forget(conn)

    def precision(self, conn: str) -> str:
        """Returns the precision of a link.

        All lanes of a group have the same precision, so this process's lanes suffice.
        """
        return joined_precision(each.end.precision for each in self.lanes.get(conn, []))

    def begin(
        self, conn: str, transfer_id: str, tables: Sequence[list[int]], first_tokens: Sequence[int], num_tokens: int
    ) -> None:
        """Begins a landing. Every rank gets the same blocks of a group."""
        self.limit.use(conn)
        for group, end in self.lanes.get(conn, []):
            layout = self._layouts[group]
            num_wanted = 1 if layout.holds.is_state else num_tokens
            blocks = tables[group][: layout.num_blocks_for(num_wanted)]
            end.begin(transfer_id, blocks, first_tokens[group], num_wanted)

    def forget(self, conn: str, transfer_id: str) -> None:
        lanes = self.lanes.get(conn)
        if not lanes:
            self.tail_latency.note(Drained(transfer_id))
            self.report(Drained(transfer_id))
        else:
            for each in lanes:
                each.end.forget(transfer_id)

    def left_s(self, transfer_id: str) -> float:
        return self.tail_latency.left_s(transfer_id)

    def progress_s(self, conn: str) -> float:
        lanes = self.lanes.get(conn)
        if lanes:
            self.progress.moved(conn, _received_nbytes(lanes))
        return self.progress.at_s(conn)


def _received_nbytes(lanes: list[InLane]) -> int:
    return sum(each.end.received_nbytes for each in lanes)


def _num_dropped(lanes: list[InLane]) -> int:
    return sum(each.end.num_dropped for each in lanes)
