"""The links from a worker to decode instances; Exports and OutLinks share them.

Knows nothing of how a link opens, rests or closes.
"""

from __future__ import annotations

import math
from collections.abc import ValuesView
from operator import attrgetter

from pd_cluster import wire
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import PeerProgress
from pd_cluster.engine.handover.links.out_link import OutLink
from pd_cluster.engine.handover.shipping import ShipLimits
from pd_cluster.kv.kv_layout import num_common_layers
from pd_cluster.types import LinkState

SENT_NBYTES = attrgetter("sent_nbytes")


class OutLinkTable:
    """Implements exports.ExportPorts."""

    def __init__(self, context: HandoverContext, progress: PeerProgress) -> None:
        self.send = context.post.send
        self.progress = progress
        self.by_peer: dict[str, OutLink] = {}  # name@epoch -> link
        self.by_conn: dict[str, OutLink] = {}
        self.closed_nbytes = 0  # sent over closed links
        self._layouts, self._clock = context.endpoint.layouts, context.clock
        self._states: dict[str, LinkState] | None = None  # None: a link has changed since the last call
        self.idle_until_s = -math.inf  # no link needs attention before this time, unless a link changes

    @property
    def links(self) -> ValuesView[OutLink]:
        return self.by_peer.values()

    def changed(self) -> None:
        """Records that a link was added, was removed, has changed its state, or must rest."""
        self._states, self.idle_until_s = None, -math.inf

    def states(self) -> dict[str, LinkState]:
        """Returns each peer's link state. The dict is never changed: after a change, a new dict is returned."""
        if self._states is None:
            self._states = {peer: link.shown for peer, link in self.by_peer.items()}
        return self._states

    @property
    def sent_nbytes(self) -> int:
        ends = [lane.end for link in self.links for lane in link.lanes]
        sent_nbytes: int = sum(map(SENT_NBYTES, ends))
        return self.closed_nbytes + sent_nbytes

    def link_to(self, peer: str) -> str | None:
        link = self.by_peer.get(peer)
        return link.conn if link is not None and link.state.is_open and not link.must_rest else None

    def awaken(self, peer: str) -> bool:
        link = self.by_peer.get(peer)
        if link is None or not (link.is_rested or link.must_rest):
            return False
        if link.awaited_s is None:
            link.awaited_s = self._clock()
        return True

    def is_waking(self, peer: str, conn: str) -> bool:
        """Whether the link to this peer is opening over this connection, because a transfer waits for it."""
        link = self.by_peer.get(peer)
        return link is not None and link.conn == conn and link.awaited_s is not None

    def limits(self, conn: str, group: int) -> ShipLimits:
        own, link = self._layouts[group], self.by_conn.get(conn)
        lanes = link.lanes_of(group) if link is not None else []
        if not lanes or (peer := lanes[0].peer) is None:
            return ShipLimits(own.block_size, own.block_nbytes, own.num_layers)
        most_nbytes = min(lane.end.max_payload_nbytes for lane in lanes)
        return ShipLimits(peer.block_size, most_nbytes, num_common_layers(own, peer))

    def ship(self, conn: str, group: int, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        """Passes the same blocks to every rank: each rank sends its own heads."""
        link = self.by_conn.get(conn)
        if link is not None:
            link.used_s = self._clock()
            for lane in link.lanes_of(group):
                lane.end.ship(transfer_id, index, piece)

    def ship_end(self, conn: str, group: int, end: wire.KVEnd) -> None:
        link = self.by_conn.get(conn)
        for lane in link.lanes_of(group) if link is not None else []:
            lane.end.ship_end(end)

    def drop(self, conn: str, transfer_id: str) -> None:
        link = self.by_conn.get(conn)
        for lane in link.lanes if link is not None else []:
            lane.end.drop(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self.progress.at_s(conn)
