"""The links from a worker to decode instances. State × event table in docs/protocol/pairs.md.

Runs on the engine's thread, except for `meet`, which runs on the mailbox's thread and passes on its messages.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import replace
from functools import partial
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LinkName
from pd_cluster.engine.handover.links.link_limits import OutLinkLimit
from pd_cluster.engine.handover.links.out_link import FIRST_BACKOFF_S, OutLane, OutLink, check_rank, lane_of
from pd_cluster.engine.handover.links.out_link_table import OutLinkTable
from pd_cluster.errors import LinkError, told
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.layer_groups import lanes_of
from pd_cluster.kv.pool_compatibility import check_groups
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.transport.transport_table import are_pairs
from pd_cluster.types import LinkState

log = logging.getLogger(__name__)


class OutLinkUsers(Protocol):
    """The transfers that use the links. Exports implements it."""

    def uses(self, conn: str) -> bool:
        """Whether a transfer is under way over this connection."""

    def link_up(self, peer: str, conn: str) -> None:
        """Called when a link for which transfers wait is up."""

    def link_lost(self, peer: str, reason: str) -> None:
        """Called when a link for which transfers wait will not open."""

    def on_link_down(self, conn: str, reason: str) -> None:
        """Ends the transfers of a link that went down. The link's state still exists during the call."""


class OutLinks:
    """P's end of every link. It fills the table of links that it shares with `users`."""

    def __init__(self, context: HandoverContext, table: OutLinkTable, users: OutLinkUsers) -> None:
        self.table = table
        self._links, self._by_conn, self._progress = table.by_peer, table.by_conn, table.progress
        self._users = users
        self._limit = OutLinkLimit(context.kv_open_links)
        self._context = context
        self._endpoint, self._post = context.endpoint, context.post
        self._clock, self._timeouts = context.clock, context.timeouts

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Keeps links to exactly these peers."""
        wanted = {peer_key(info.name, info.epoch): info for info in peers}
        for peer in [p for p in self._links if p not in wanted]:
            link = self._links.pop(peer)
            self._close(link, "the scheduler has removed it: the peer is gone, or roles have changed")
        for peer, info in wanted.items():
            if peer not in self._links:
                self._links[peer] = OutLink(info, self.table.changed)
        self.table.changed()
        self.tick()

    def tick(self) -> None:
        now_s = self._clock()
        if now_s < self.table.idle_until_s:
            return
        self._limit.choose(self._links.values(), now_s, self._users.uses)
        quiet_s, others = now_s - self._timeouts.link_keepalive_s, list[OutLink]()
        for link in self._links.values():
            if not link.state.is_open or link.must_rest:
                others.append(link)
            elif link.used_s < quiet_s and link.probed_s < quiet_s:
                link.probed_s = now_s
                for lane in link.lanes:
                    lane.end.probe()
        if not others and not self._limit.most:
            used_s = (max(link.used_s, link.probed_s) for link in self._links.values())
            self.table.idle_until_s = min(used_s, default=math.inf) + self._timeouts.link_keepalive_s
        for link in sorted(others, key=lambda each: (each.awaited_s is None, each.awaited_s or 0.0)):
            if link.state.phase == "opening" and now_s >= link.due_s:
                self._retry(link, f"no answer within {link.timeout_s:g} s")
            elif link.must_rest and link.state.is_open and not self._users.uses(link.conn):
                self._rest(link)
            elif link.is_closing and now_s >= link.due_s:
                self._leave(link)
            elif link.waits_for_pair(now_s) or (link.state.phase == "waiting" and now_s >= link.due_s):
                self._start(link)

    def states(self) -> dict[str, LinkState]:
        return self.table.states()

    def state_of(self, conn: str) -> LinkState:
        link = self._by_conn.get(conn)
        return LinkState("waiting") if link is None else link.state

    # ---- events of the connection

    def on_opened(self, conn: str) -> None:
        link = self._by_conn.get(conn)
        if link is not None:
            link.is_connected = True
            self._announce(link)

    def on_offered(self, conn: str) -> None:
        """Announces the link if a rank's offers have arrived and no others are missing."""
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
        own = self._endpoint.layouts[lane.lane.group].of_rank(lane.lane.source_rank)
        peer = KVLayout.from_info(answer.layout)
        try:
            check_groups([own], [peer])
            check_rank(lane.lane, link.info, peer)
        except LinkError as error:
            self._refuse(link, str(error))
            return
        lane.peer = peer
        link.has_pair = link.has_pair or are_pairs([answer.transport])
        self._set_timeout(link, 3 * self._timeouts.connect_timeout_s)  # for the transport to open, then for the probe
        lane.end.open(answer.transport, own, peer)

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Passes D's value to its lane. Runs on the mailbox's thread."""
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
        if len(chosen) == len(link.lanes):
            self._is_ready(link, tuple(sorted({each.transport for each in chosen})))

    def on_rest(self, conn: str, rest: wire.LinkRest) -> None:
        """Handles D's answer that it has closed its end, or does not open it until a transfer needs it."""
        link = self._find(conn, rest.link_id)
        if link is None or link.state.is_open:
            return
        if link.state.phase == "opening":
            self._set_at_rest(link)
        self._leave(link)

    def on_yield(self, conn: str, wish: wire.LinkYield) -> None:
        """Marks the link as one that must rest, because D needs its capacity for another link."""
        link = self._find(conn, wish.link_id)
        if link is not None and link.has_pair:  # if it is still opening, waiting transfers are sent first
            link.must_rest = True
            self.table.changed()

    def on_queued(self, conn: str, queued: wire.LinkQueued) -> None:
        link = self._find(conn, queued.link_id)
        if link is not None and link.state.phase == "opening":
            self._set_timeout(link, self._timeouts.transfer_timeout_s)

    def on_refused(self, conn: str, refused: wire.LinkRefused) -> None:
        link = self._find(conn, refused.link_id)
        if link is None:
            return
        if refused.retry:
            self._retry(link, refused.reason)
        else:
            self._refuse(link, refused.reason)

    def on_down(self, conn: str, reason: str) -> None:
        """Schedules another attempt after the connection was lost or this end's thread failed."""
        link = self._by_conn.get(conn)
        if link is not None:
            (self._leave if link.is_closing else partial(self._retry, reason=reason))(link)

    def knows(self, conn: str) -> bool:
        return conn in self._by_conn

    # ---- internal

    def _start(self, link: OutLink) -> None:
        wish = self._limit.wish(link, self._links.values())
        if wish is not None:
            link.has_pair, link.pair = wish != "none", wish
            self._open(link)

    def _open(self, link: OutLink) -> None:
        info, layouts, context = link.info, self._endpoint.layouts, self._context
        theirs = [replace(layout, tp_size=info.tp_size, tp_rank=0) for layout in layouts]
        try:
            check_groups(layouts, theirs)
        except LinkError as error:
            link.state = LinkState("refused", reason=error.text)
            return
        conn = link.conn = self._post.connect(info.name, info.epoch, info.host, info.control_port, info.public_key)
        link.link_id = secrets.token_hex(8)
        link.lanes, link.is_connected, link.is_announced = [], False, False
        self._by_conn[conn] = link
        # Keep the reason why the previous attempt ended: it is shown until this attempt ends.
        link.state = LinkState("opening", reason=link.state.reason)
        self._set_timeout(link, 3 * self._timeouts.connect_timeout_s)
        name = LinkName(conn, link.link_id, peer_key(info.name, info.epoch))
        try:
            for index, lane in enumerate(lanes_of(layouts, theirs)):
                end = context.ends.send_end(name, index, lane, context.report, context.note)
                link.lanes.append(OutLane(lane, end))
        except LinkError as error:
            (self._retry if error.retry else self._refuse)(link, error.text)

    def _is_ready(self, link: OutLink, over: tuple[wire.TransportName, ...]) -> None:
        """Starts to use a link, because the probe has passed over all its lanes."""
        try:
            precision = link.precision
        except LinkError as error:
            self._retry(link, error.text)
            return
        link.over = over
        link.state = LinkState("up", over, precision)
        link.backoff_s, link.used_s = FIRST_BACKOFF_S, self._clock()
        link.has_pair = are_pairs(over)
        link.is_rested = link.is_unproven = False
        shown = f"{link.state.over}, {precision}" if precision else link.state.over
        log.info("link to %s is up over %s", link.info.name, shown)
        if link.awaited_s is not None:
            link.awaited_s = None
            self._users.link_up(peer_key(link.info.name, link.info.epoch), link.conn)

    def _announce(self, link: OutLink) -> None:
        """Sends LinkOpen once the connection is up and all ranks have reported their offers."""
        offers = [lane.end.offers for lane in link.lanes]
        if link.is_announced or not link.is_connected or not offers or None in offers:
            return
        link.is_announced = True
        try:
            opened = self._endpoint.network_policy.kept(
                peer_key(link.info.name, link.info.epoch), link.to_open(self._endpoint)
            )
        except LinkError as error:
            self._refuse(link, error.text)
            return
        self._post.send(link.conn, opened)

    def _set_timeout(self, link: OutLink, seconds: float) -> None:
        link.timeout_s, link.due_s = seconds, self._clock() + seconds

    def _rest(self, link: OutLink) -> None:
        """Closes this end, and asks D to close its own. The connection stays open until D has answered."""
        self._set_at_rest(link)
        link.due_s = self._clock() + self._timeouts.connect_timeout_s
        self._post.send(link.conn, wire.LinkRest(link.link_id))

    def _set_at_rest(self, link: OutLink) -> None:
        link.state, link.is_rested, link.backoff_s = LinkState("resting"), True, FIRST_BACKOFF_S
        self.table.closed_nbytes += link.close_lanes()

    def _leave(self, link: OutLink) -> None:
        """Ends the connection of a link at rest."""
        self._by_conn.pop(link.conn, None)
        self._post.disconnect(link.conn)
        self._progress.forget(link.conn)
        link.conn = ""

    def _refuse(self, link: OutLink, reason: str) -> None:
        log.error("%s and this instance cannot be linked: %s", link.info.name, told(reason))
        self._close(link, reason)
        link.state = LinkState("refused", reason=reason)

    def _retry(self, link: OutLink, reason: str) -> None:
        has_tried = link.state.is_open or any(lane.answered for lane in link.lanes)
        link.is_unproven = link.is_unproven or (has_tried and link.has_pair and self._limit.most > 0)
        self._close(link, reason)
        link.wait(reason, self._clock())

    def _close(self, link: OutLink, reason: str) -> None:
        if self._by_conn.pop(link.conn, None) is not None:
            if link.state.is_open:
                log.warning("link to %s is down: %s", link.info.name, told(reason))
            self._users.on_link_down(link.conn, reason)
            self._leave(link)
            self.table.closed_nbytes += link.close_lanes()
        link.is_rested = False
        if link.awaited_s is not None:
            link.awaited_s = None
            self._users.link_lost(peer_key(link.info.name, link.info.epoch), reason)

    def _find(self, conn: str, link_id: str) -> OutLink | None:
        link = self._by_conn.get(conn)
        return link if link is not None and link.link_id == link_id else None
