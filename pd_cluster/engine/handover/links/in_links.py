"""The links from prefill instances to a worker. State × event table in docs/protocol/pairs.md.

Runs on the engine's thread, with two exceptions: `route` and `meet` run on the mailbox's thread and pass on its
messages; the lanes' threads report events. So a landed transfer is confirmed without waiting for the end of a step.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.in_lanes import InLane, InLanes
from pd_cluster.engine.handover.links.lane_barrier import LaneBarrier
from pd_cluster.engine.handover.links.link_limits import Queued
from pd_cluster.errors import LinkError, called
from pd_cluster.kv.kv_layout import KVLayout, Lane
from pd_cluster.kv.layer_groups import lanes_of
from pd_cluster.kv.pool_compatibility import check_groups
from pd_cluster.transport.link_events import Landed, LinkEvent, Report

log = logging.getLogger(__name__)


class InLinkUsers(Protocol):
    """The transfers that use the links. Imports implements it."""

    def on_link_down(self, conn: str, reason: str) -> None:
        """Ends the landings of a link that went down. The link's threads still run, to acknowledge that they write no
        more.
        """


class InLinks:
    """D's end of every link. It fills the table of open links that it shares with `users`.

    The context's `report` is called on the lanes' threads, once for each event of a whole link.
    """

    def __init__(self, context: HandoverContext, table: InLanes, users: InLinkUsers) -> None:
        self.table = table
        self._users = users
        self._context = context
        self._endpoint, self._post, self._note = context.endpoint, context.post, context.note
        self._limit, self._lanes, self._link_ids = table.limit, table.lanes, table.link_ids

    def on_open(self, conn: str, peer: str, opened: wire.LinkOpen, is_announced: bool) -> None:
        """Opens or refuses a link. `is_announced`: the scheduler has announced this peer."""
        if conn in self._lanes or self._limit.is_queued(conn):
            return
        try:
            if not is_announced:
                raise LinkError(f"the scheduler has not announced {peer} to {self._endpoint.own}", retry=True)
            self._check(opened)
            opened = self._endpoint.network_policy.kept(peer, opened)
            needs_place = self._needs_pair(opened)
        except LinkError as error:
            self._refuse(conn, peer, opened, error)
            return
        if not needs_place or (self._limit.has_capacity and opened.pair != "none"):
            self._open(conn, peer, opened, needs_place)
        elif opened.pair != "now":
            self._post.send(conn, wire.LinkRest(opened.link_id))
        else:
            self._limit.queue.append(Queued(conn, peer, opened))
            self._post.send(conn, wire.LinkQueued(opened.link_id))
            self._ask_to_rest()

    def _open(self, conn: str, peer: str, opened: wire.LinkOpen, needs_place: bool) -> None:
        lanes: list[InLane] = []
        try:
            reports = self._reports(conn, len(opened.lanes))
            for index, (lane, report) in enumerate(zip(opened.lanes, reports, strict=True)):
                end = self._context.ends.receive_end(conn, peer, opened, index, report, self._note)
                lanes.append(InLane(lane.group, end))
        except LinkError as error:
            self._refuse(conn, peer, opened, error)
            for each in lanes:
                each.end.start()  # a thread must start before it can end
                each.end.close()
            return
        if needs_place:
            self._limit.take(conn)
        self._link_ids[conn], self.table.peers[conn] = opened.link_id, peer
        self._lanes[conn] = lanes
        for each in lanes:
            each.end.start()

    def on_failed(self, conn: str, reason: str) -> None:
        """Asks P to open a new link, because this end's thread failed."""
        if conn in self._lanes:
            self._post.send(conn, wire.LinkRefused(self._link_ids[conn], reason, True))
            self.on_down(conn, reason)

    def on_down(self, conn: str, reason: str) -> None:
        self._users.on_link_down(conn, reason)
        self._limit.leave(conn)
        self.table.remove(conn)
        while (queued := self._limit.next()) is not None:
            self._open(*queued, needs_place=True)
            self._ask_to_rest()

    def on_rest(self, conn: str, rest: wire.LinkRest) -> None:
        """Closes this end, because P has closed its own; no transfer is under way."""
        if self._link_ids.get(conn) == rest.link_id:
            self.on_down(conn, "it is at rest")
            self._post.send(conn, rest)

    def route(self, conn: str, frame: wire.KVFrame) -> None:
        """Passes a frame to its lane. Runs on the mailbox's thread."""
        lanes = self._lanes.get(conn, [])
        if 0 <= frame.lane < len(lanes):
            lanes[frame.lane].end.put(frame)

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Passes P's value to its lane. Runs on the mailbox's thread."""
        lanes = self._lanes.get(conn, [])
        if 0 <= value.lane < len(lanes):
            lanes[value.lane].end.meet(value)

    # ---- internal

    def _needs_pair(self, opened: wire.LinkOpen) -> bool:
        is_counted = self._limit.most or opened.pair == "none"
        return bool(is_counted) and self._context.ends.needs_pair(opened)

    def _ask_to_rest(self) -> None:
        for conn in self._limit.to_ask():
            self._post.send(conn, wire.LinkYield(self._link_ids[conn]))

    def _refuse(self, conn: str, peer: str, opened: wire.LinkOpen, error: LinkError) -> None:
        log.log(logging.INFO if error.retry else logging.ERROR, "refused %s: %s", peer, error)
        self._post.send(conn, wire.LinkRefused(opened.link_id, error.text, error.retry))

    def _reports(self, conn: str, num_lanes: int) -> list[Report]:
        barrier = LaneBarrier(num_lanes)
        return [partial(self._of_lane, conn, barrier, lane) for lane in range(num_lanes)]

    def _of_lane(self, conn: str, barrier: LaneBarrier, lane: int, event: LinkEvent) -> None:
        """Reports an event, on a lane's thread.

        `Landed` is reported before Confirm is sent, so the engine reads it before P's answer.
        """
        whole = barrier.add(lane, event)
        if whole is None:
            return
        self.table.tail_latency.note(whole)
        self.table.report(whole)
        if isinstance(whole, Landed):
            self._note(whole.transfer_id, "landing complete")
            self._post.send(conn, wire.Confirm(whole.transfer_id))

    def _check(self, opened: wire.LinkOpen) -> None:
        endpoint = self._endpoint
        if opened.model_identity != endpoint.model_identity:
            raise LinkError(
                f"the models differ: the prefill instance serves {opened.model_identity[:12]}, "
                f"the decode instance {endpoint.model_identity[:12]}; start both with the same {called('model')}"
            )
        if (found := opened.numerics.difference(endpoint.numerics, endpoint.options.mixed)) is not None:
            setting, theirs, ours = found
            raise LinkError(
                f"{setting} differs: {theirs} on the prefill instance and {ours} on the decode instance; start both "
                f"with the same value"
            )
        for name in opened.options.__struct_fields__:
            theirs, ours = getattr(opened.options, name), getattr(endpoint.options, name)
            if theirs != ours:
                raise LinkError(
                    f"{called(f'kv_{name}')} differs: {theirs} on the prefill instance and {ours} on the "
                    f"decode instance; start both with the same value"
                )
        sources = [KVLayout.from_info(layout) for layout in opened.layouts]
        check_groups(sources, endpoint.layouts)
        if len(opened.num_blocks) != len(sources):
            raise LinkError(f"the prefill instance has {len(opened.num_blocks)} pools for {len(sources)} groups")
        told = [Lane(lane.source_rank, lane.target_rank, lane.group) for lane in opened.lanes]
        if told != lanes_of(sources, endpoint.layouts):
            raise LinkError(
                f"the prefill instance of {sources[0].tp_size} ranks and the decode instance of "
                f"{endpoint.layouts[0].tp_size} do not agree on the lanes between their ranks"
            )
