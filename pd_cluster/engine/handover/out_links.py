"""The links of a worker to decode instances. State × event table in docs/protocol.md.

Runs on the engine's thread, except for `meet`, which passes on what the mailbox receives.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pd_cluster import wire
from pd_cluster.engine.handover.exports import ShipLimits
from pd_cluster.engine.handover.links import LaneEnds, PeerProgress, Post, Side
from pd_cluster.engine.handover.out_link import FIRST_BACKOFF_S, OutLane, OutLink, check_rank, lane_of
from pd_cluster.engine.handover.pairs import Rests
from pd_cluster.errors import LinkError, told
from pd_cluster.kv.layout import KVLayout, check_pair, lanes
from pd_cluster.net.admission import peer_key
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.events import Report
from pd_cluster.transport.table import are_pairs
from pd_cluster.types import LinkState, Note, note_nothing

log = logging.getLogger(__name__)


class OutLinks:
    """P's end of every link. `down(conn, reason)` is called before a link's state is lost."""

    def __init__(
        self,
        side: Side,
        post: Post,
        ends: LaneEnds,
        report: Report,
        down: Callable[[str, str], None],
        progress: PeerProgress,
        clock: Callable[[], float],
        timeouts: Timeouts,
        note: Note = note_nothing,
        rests: Rests = Rests(),  # noqa: B008 - frozen
    ) -> None:
        self._rests = rests
        self._side = side
        self._post = post
        self._make = ends
        self._report = report
        self._down = down
        self._progress = progress
        self._clock = clock
        self._timeouts = timeouts
        self._note = note
        self._links: dict[str, OutLink] = {}  # by peer's name@epoch
        self._by_conn: dict[str, OutLink] = {}
        self._sent_nbytes = 0  # over links that are gone

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Keeps links to exactly these peers."""
        wanted = {peer_key(info.name, info.epoch): info for info in peers}
        for peer in [p for p in self._links if p not in wanted]:
            link = self._links.pop(peer)
            self._close(link, "the scheduler wants it no more: it is gone, or roles have changed")
        for peer, info in wanted.items():
            self._links.setdefault(peer, OutLink(info))
        self.tick()

    def tick(self) -> None:
        now_s = self._clock()
        self._rests.choose(self._links.values(), now_s)
        for link in sorted(self._links.values(), key=lambda each: (each.awaited_s is None, each.awaited_s or 0.0)):
            if link.state.phase == "opening" and now_s >= link.due_s:
                self._retry(link, f"no answer within {link.patience_s:g} s")
            elif link.must_rest and link.state.is_open and not self._rests.uses(link.conn):
                self._rest(link)
            elif link.is_closing and now_s >= link.due_s:
                self._leave(link)
            elif link.waits_for_place(now_s) or (link.state.phase == "waiting" and now_s >= link.due_s):
                self._start(link)
            elif link.state.is_open and now_s - max(link.used_s, link.probed_s) > self._timeouts.link_keepalive_s:
                link.probed_s = now_s
                for lane in link.lanes:
                    lane.end.probe()

    def states(self) -> dict[str, LinkState]:
        return {peer: link.shown for peer, link in self._links.items()}

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes + sum(link.sent_nbytes for link in self._links.values())

    # ---- events of the connection

    def on_opened(self, conn: str) -> None:
        link = self._by_conn.get(conn)
        if link is not None:
            link.is_connected = True
            self._announce(link)

    def on_offered(self, conn: str) -> None:
        """Announces the link if another rank's offers were the last missing."""
        link = self._by_conn.get(conn)
        if link is not None:
            self._announce(link)

    def on_answer(self, conn: str, answer: wire.LinkAnswer) -> None:
        link = self._find(conn, answer.link_id)
        lane = lane_of(link, answer.lane)
        if link is None or lane is None or link.state.phase != "opening":
            return
        if answer.transport in lane.answered:
            self._retry(link, f"{link.info.name} chose {answer.transport} twice")
            return
        lane.answered.add(answer.transport)
        own, peer = self._side.layout.of_rank(lane.lane.source_rank), KVLayout.from_info(answer.layout)
        try:
            check_pair(own, peer)
            check_rank(lane.lane, link.info, peer)
        except LinkError as error:
            self._refuse(link, str(error))
            return
        link.peer_block_size = peer.block_size
        link.has_place = link.has_place or are_pairs([answer.transport])
        self._set_patience(link, 3 * self._timeouts.connect_timeout_s)  # it opens, then the probe arrives
        lane.end.open(answer.transport, own, peer)

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Called on the mailbox's thread."""
        lane = lane_of(self._by_conn.get(conn), value.lane)
        if lane is not None:
            lane.end.meet(value)

    def on_ready(self, conn: str, ready: wire.LinkReady) -> None:
        link = self._find(conn, ready.link_id)
        lane = lane_of(link, ready.lane)
        if link is None or lane is None or link.state.phase != "opening":
            return
        lane.ready = ready
        lane.end.settle()
        chosen = [lane.ready for lane in link.lanes if lane.ready is not None]
        if len({each.precision for each in chosen}) > 1:  # then D would not know what its blocks hold
            self._retry(link, "some of its lanes are exact and some are not")
        elif len(chosen) == len(link.lanes):
            link.over = tuple(sorted({each.transport for each in chosen}))
            link.state = LinkState("up", link.over, ready.precision)
            link.backoff_s, link.used_s = FIRST_BACKOFF_S, self._clock()
            link.has_place = are_pairs(link.over)
            link.is_rested = link.is_unproven = False
            log.info("link to %s is up over %s", link.info.name, link.state.over)
            if link.awaited_s is not None:
                link.awaited_s = None
                self._rests.woken(peer_key(link.info.name, link.info.epoch), conn)

    def on_rest(self, conn: str, rest: wire.LinkRest) -> None:
        """D has closed its end, or does not open it before a transfer needs it."""
        link = self._find(conn, rest.link_id)
        if link is None or link.state.is_open:
            return
        if link.state.phase == "opening":
            self._lay_down(link)
        self._leave(link)

    def on_yield(self, conn: str, wish: wire.LinkYield) -> None:
        """D wants another link to have this one's place."""
        link = self._find(conn, wish.link_id)
        if link is not None and link.has_place:  # it may still be opening here: what waits for it is sent first
            link.must_rest = True

    def on_queued(self, conn: str, queued: wire.LinkQueued) -> None:
        link = self._find(conn, queued.link_id)
        if link is not None and link.state.phase == "opening":
            self._set_patience(link, self._timeouts.transfer_timeout_s)

    def on_refused(self, conn: str, refused: wire.LinkRefused) -> None:
        link = self._find(conn, refused.link_id)
        if link is None:
            return
        if refused.retry:
            self._retry(link, refused.reason)
        else:
            self._refuse(link, refused.reason)

    def on_down(self, conn: str, reason: str) -> None:
        """Retries after the connection was lost or this end's thread failed."""
        link = self._by_conn.get(conn)
        if link is not None:
            (self._leave if link.is_closing else partial(self._retry, reason=reason))(link)

    def knows(self, conn: str) -> bool:
        return conn in self._by_conn

    # ---- ExportPorts

    def link_to(self, peer: str) -> str | None:
        link = self._links.get(peer)
        return link.conn if link is not None and link.state.is_open and not link.must_rest else None

    def awaken(self, peer: str) -> bool:
        link = self._links.get(peer)
        if link is None or not (link.is_rested or link.must_rest):
            return False
        if link.awaited_s is None:
            link.awaited_s = self._clock()
        return True

    def send(self, conn: str, body: wire.Body) -> None:
        self._post.send(conn, body)

    def limits(self, conn: str) -> ShipLimits:
        link = self._by_conn.get(conn)
        if link is None or not link.peer_block_size:
            return ShipLimits(self._side.layout.block_size, self._side.layout.block_nbytes)
        return ShipLimits(link.peer_block_size, min(lane.end.max_payload_nbytes for lane in link.lanes))

    def ship(self, conn: str, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        """Sends the same blocks from every rank: each sends its own heads."""
        link = self._by_conn.get(conn)
        if link is not None:
            link.used_s = self._clock()
            for lane in link.lanes:
                lane.end.ship(transfer_id, index, piece)

    def ship_end(self, conn: str, end: wire.KVEnd) -> None:
        for lane in self._lanes_of(conn):
            lane.end.ship_end(end)

    def drop(self, conn: str, transfer_id: str) -> None:
        for lane in self._lanes_of(conn):
            lane.end.drop(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self._progress.at_s(conn)

    # ---- inside

    def _start(self, link: OutLink) -> None:
        wish = self._rests.wish(link, self._links.values())
        if wish is not None:
            link.has_place, link.pair = wish != "none", wish
            self._open(link)

    def _open(self, link: OutLink) -> None:
        info, layout = link.info, self._side.layout
        peer_layout = replace(layout, tp_size=info.tp_size, tp_rank=0)
        try:
            check_pair(layout, peer_layout)
        except LinkError as error:
            link.state = LinkState("refused", reason=error.text)
            return
        conn = link.conn = self._post.connect(info.name, info.epoch, info.host, info.control_port, info.public_key)
        link.link_id = secrets.token_hex(8)
        link.lanes, link.is_connected, link.is_announced = [], False, False
        self._by_conn[conn] = link
        # Until this attempt ends, the reason for the end of the last one is worth showing.
        link.state = LinkState("opening", reason=link.state.reason)
        self._set_patience(link, 3 * self._timeouts.connect_timeout_s)
        peer = peer_key(info.name, info.epoch)
        try:
            for index, lane in enumerate(lanes(layout, peer_layout)):
                end = self._make.send_end(conn, link.link_id, peer, index, lane, self._report, self._note)
                link.lanes.append(OutLane(lane, end))
        except LinkError as error:
            (self._retry if error.retry else self._refuse)(link, error.text)

    def _announce(self, link: OutLink) -> None:
        """Sends LinkOpen once the connection is up and all ranks have reported what they offer."""
        offers = [lane.end.offers for lane in link.lanes]
        if link.is_announced or not link.is_connected or not offers or None in offers:
            return
        link.is_announced = True
        try:
            opened = self._side.crossing.kept(peer_key(link.info.name, link.info.epoch), link.to_open(self._side))
        except LinkError as error:
            self._refuse(link, error.text)
            return
        self._post.send(link.conn, opened)

    def _set_patience(self, link: OutLink, seconds: float) -> None:
        link.patience_s, link.due_s = seconds, self._clock() + seconds

    def _rest(self, link: OutLink) -> None:
        """Closes this end, and asks D to close its own; the connection stays until D has."""
        self._lay_down(link)
        link.due_s = self._clock() + self._timeouts.connect_timeout_s
        self._post.send(link.conn, wire.LinkRest(link.link_id))

    def _lay_down(self, link: OutLink) -> None:
        link.state, link.is_rested, link.backoff_s = LinkState("resting"), True, FIRST_BACKOFF_S
        self._sent_nbytes += link.close_lanes()

    def _leave(self, link: OutLink) -> None:
        """Ends the connection of a link that rests."""
        self._by_conn.pop(link.conn, None)
        self._post.disconnect(link.conn)
        self._progress.forget(link.conn)
        link.conn = ""

    def _refuse(self, link: OutLink, reason: str) -> None:
        log.error("%s and this instance cannot be a pair: %s", link.info.name, told(reason))
        self._close(link, reason)
        link.state = LinkState("refused", reason=reason)

    def _retry(self, link: OutLink, reason: str) -> None:
        has_tried = link.state.is_open or any(lane.answered for lane in link.lanes)
        link.is_unproven = link.is_unproven or (has_tried and link.has_place and self._rests.most > 0)
        self._close(link, reason)
        link.wait(reason, self._clock())

    def _close(self, link: OutLink, reason: str) -> None:
        if self._by_conn.pop(link.conn, None) is not None:
            if link.state.is_open:
                log.warning("link to %s is down: %s", link.info.name, told(reason))
            self._down(link.conn, reason)
            self._leave(link)
            self._sent_nbytes += link.close_lanes()
        link.is_rested = False
        if link.awaited_s is not None:
            link.awaited_s = None
            self._rests.lost(peer_key(link.info.name, link.info.epoch), reason)

    def _find(self, conn: str, link_id: str) -> OutLink | None:
        link = self._by_conn.get(conn)
        return link if link is not None and link.link_id == link_id else None

    def _lanes_of(self, conn: str) -> list[OutLane]:
        link = self._by_conn.get(conn)
        return link.lanes if link is not None else []
