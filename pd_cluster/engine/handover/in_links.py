"""The links of a worker from prefill instances. State × event table in docs/protocol/pairs.md.

Runs on the engine's thread, except for `route` and `meet`, which pass on what the mailbox receives, and for the lanes'
reports: a landed transfer is confirmed without waiting for a step.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.context import HandoverContext
from pd_cluster.engine.handover.gather import Gather
from pd_cluster.engine.handover.in_table import InLane, InLanes
from pd_cluster.engine.handover.pairs import Queued
from pd_cluster.errors import LinkError, called
from pd_cluster.kv.groups import lanes_of
from pd_cluster.kv.layout import KVLayout, Lane
from pd_cluster.kv.pair_check import check_groups
from pd_cluster.transport.events import Landed, LinkEvent, Report

log = logging.getLogger(__name__)


class LinkLosers(Protocol):
    """The transfers that links carry: Imports."""

    def on_link_down(self, conn: str, reason: str) -> None:
        """Called while the link's threads still acknowledge drains."""


class InLinks:
    """D's end of every link. Fills the table that it shares with its users.

    The context's `report` is called on the lanes' threads, once for an event of a whole link.
    """

    def __init__(self, context: HandoverContext, table: InLanes, users: LinkLosers) -> None:
        self.table = table
        self._users = users
        self._context = context
        self._side, self._post, self._note = context.side, context.post, context.note
        self._places, self._lanes, self._link_ids = table.places, table.lanes, table.link_ids

    def on_open(self, conn: str, peer: str, opened: wire.LinkOpen, is_told: bool) -> None:
        """Opens or refuses a link. `is_told`: the scheduler has announced this peer."""
        if conn in self._lanes or self._places.is_queued(conn):
            return
        try:
            if not is_told:
                raise LinkError(f"the scheduler has not told {self._side.own} of {peer}", retry=True)
            self._check(opened)
            opened = self._side.crossing.kept(peer, opened)
            needs_place = self._needs_place(opened)
        except LinkError as error:
            self._refuse(conn, peer, opened, error)
            return
        if not needs_place or (self._places.has_room and opened.pair != "none"):
            self._open(conn, peer, opened, needs_place)
        elif opened.pair != "now":
            self._post.send(conn, wire.LinkRest(opened.link_id))
        else:
            self._places.queue.append(Queued(conn, peer, opened))
            self._post.send(conn, wire.LinkQueued(opened.link_id))
            self._ask_for_places()

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
                each.end.start()  # so that it ends
                each.end.close()
            return
        if needs_place:
            self._places.take(conn)
        self._link_ids[conn] = opened.link_id
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
        self._places.leave(conn)
        self.table.remove(conn)
        while (queued := self._places.next()) is not None:
            self._open(*queued, needs_place=True)
            self._ask_for_places()

    def on_rest(self, conn: str, rest: wire.LinkRest) -> None:
        """P has closed its end; nothing of it is under way."""
        if self._link_ids.get(conn) == rest.link_id:
            self.on_down(conn, "it rests")
            self._post.send(conn, rest)

    def route(self, conn: str, frame: wire.KVFrame) -> None:
        """Called on the mailbox's thread."""
        lanes = self._lanes.get(conn, [])
        if 0 <= frame.lane < len(lanes):
            lanes[frame.lane].end.put(frame)

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Called on the mailbox's thread."""
        lanes = self._lanes.get(conn, [])
        if 0 <= value.lane < len(lanes):
            lanes[value.lane].end.meet(value)

    # ---- inside

    def _needs_place(self, opened: wire.LinkOpen) -> bool:
        is_counted = self._places.most or opened.pair == "none"
        return bool(is_counted) and self._context.ends.needs_pair(opened)

    def _ask_for_places(self) -> None:
        for conn in self._places.to_ask():
            self._post.send(conn, wire.LinkYield(self._link_ids[conn]))

    def _refuse(self, conn: str, peer: str, opened: wire.LinkOpen, error: LinkError) -> None:
        log.log(logging.INFO if error.retry else logging.ERROR, "refused %s: %s", peer, error)
        self._post.send(conn, wire.LinkRefused(opened.link_id, error.text, error.retry))

    def _reports(self, conn: str, num_lanes: int) -> list[Report]:
        gather = Gather(num_lanes)
        return [partial(self._of_lane, conn, gather, lane) for lane in range(num_lanes)]

    def _of_lane(self, conn: str, gather: Gather, lane: int, event: LinkEvent) -> None:
        """Reports an event, on a lane's thread. `Landed` goes first: the engine reads it before P's answer."""
        whole = gather.add(lane, event)
        if whole is None:
            return
        self.table.tails.note(whole)
        self.table.report(whole)
        if isinstance(whole, Landed):
            self._note(whole.transfer_id, "landing complete")
            self._post.send(conn, wire.Confirm(whole.transfer_id))

    def _check(self, opened: wire.LinkOpen) -> None:
        side = self._side
        if opened.model_identity != side.model_identity:
            raise LinkError(
                f"the models differ: the prefill instance serves {opened.model_identity[:12]}, "
                f"the decode instance {side.model_identity[:12]}; start both with the same {called('model')}"
            )
        if (found := opened.numerics.difference(side.numerics, side.options.mixed)) is not None:
            setting, theirs, ours = found
            raise LinkError(
                f"{setting} differs: {theirs} on the prefill instance and {ours} on the decode instance; start both "
                f"with the same"
            )
        for name in opened.options.__struct_fields__:
            theirs, ours = getattr(opened.options, name), getattr(side.options, name)
            if theirs != ours:
                raise LinkError(
                    f"{called(f'kv_{name}')} differs: {theirs} on the prefill instance and {ours} on the "
                    f"decode instance; start both with the same"
                )
        sources = [KVLayout.from_info(layout) for layout in opened.layouts]
        check_groups(sources, side.layouts)
        if len(opened.num_blocks) != len(sources):
            raise LinkError(f"the prefill instance has {len(opened.num_blocks)} pools for {len(sources)} groups")
        told = [Lane(lane.source_rank, lane.target_rank, lane.group) for lane in opened.lanes]
        if told != lanes_of(sources, side.layouts):
            raise LinkError(
                f"the prefill instance of {sources[0].tp_size} ranks and the decode instance of "
                f"{side.layouts[0].tp_size} do not agree about who sends to whom"
            )
