"""Ends of lanes on other ranks of this instance, as rank 0 sees them: every call becomes a message.

Calls come from the engine's thread (`put` and `meet` from the mailbox's). Followers' messages are read on their
channels' threads, which only change numbers or pass messages on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pd_cluster import wire
from pd_cluster.engine.handover.events import Offered
from pd_cluster.engine.handover.links import LocalLanes, ReceiveEnd, SendEnd
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.channel import Channel
from pd_cluster.kv.layout import KVLayout, Lane
from pd_cluster.transport.events import Drained, LinkEvent, Report
from pd_cluster.types import Note


class _RemoteEnd(NamedTuple):
    """The place of an end on another rank."""

    at: tuple[str, int]  # connection and lane
    channel: Channel  # to that rank
    progress: Callable[[], to.Reached]  # this rank's progress
    done: Callable[[], None]  # called when no more messages will come


class RemoteSend:
    """P's end of a lane on another rank. See links.SendEnd."""

    def __init__(self, place: _RemoteEnd) -> None:
        self._at, self._channel, self._progress, self._done = place
        self._max_payloads: dict[wire.TransportName, int] = {}
        self.offers: list[wire.TransportOffer] | None = None
        self.probe_seed = 0
        self.max_payload_nbytes = 0
        self.sent_nbytes = 0

    def offered(self, told: to.Offers) -> None:
        self._max_payloads, self.probe_seed = told.max_payloads, told.probe_seed
        self.offers = told.offers

    def counted(self, told: to.Counted) -> None:
        self.sent_nbytes = told.nbytes

    def open(self, transport: wire.TransportName, own: KVLayout, peer: KVLayout) -> None:
        self.max_payload_nbytes = self._max_payloads.get(transport, 0)
        self._channel.send(to.Open(*self._at, transport, peer.to_info()))

    def meet(self, value: wire.LinkValue) -> None:
        self._channel.send(to.Value(*self._at, value))

    def settle(self) -> None:
        self._channel.send(to.Settle(*self._at))

    def probe(self) -> None:
        self._channel.send(to.SendProbe(*self._at))

    def ship(self, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        self._channel.send(to.Ship(*self._at, transfer_id, index, piece, self._progress()))

    def ship_end(self, end: wire.KVEnd) -> None:
        self._channel.send(to.ShipEnd(*self._at, end, self._progress()))

    def drop(self, transfer_id: str) -> None:
        self._channel.send(to.Drop(*self._at, transfer_id))

    def close(self) -> None:
        self._channel.send(to.CloseSend(*self._at))
        self._done()


class RemoteReceive:
    """D's end of a lane on another rank. See links.ReceiveEnd."""

    precision = ""  # only the local lane's precision is reported

    def __init__(self, place: _RemoteEnd) -> None:
        self._at, self._channel, self._progress, self._done = place
        self._lock = threading.Lock()
        self._num_draining = 0
        self._is_closed = False
        self.received_nbytes = 0
        self.num_dropped = 0

    def reported(self, event: LinkEvent) -> None:
        if isinstance(event, Drained):
            self._change(num_draining=-1)

    def counted(self, told: to.Counted) -> None:
        self.received_nbytes, self.num_dropped = told.nbytes, told.num_dropped

    def start(self) -> None:
        self._channel.send(to.StartReceive(*self._at))

    def put(self, frame: wire.KVFrame) -> None:
        self._channel.send(to.Frame(*self._at, frame))

    def meet(self, value: wire.LinkValue) -> None:
        self._channel.send(to.Value(*self._at, value))

    def begin(self, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int) -> None:
        self._channel.send(to.Begin(*self._at, transfer_id, block_ids, first_token, num_tokens, self._progress()))

    def forget(self, transfer_id: str) -> None:
        self._change(num_draining=1)
        self._channel.send(to.Forget(*self._at, transfer_id))

    def close(self) -> None:
        self._channel.send(to.CloseReceive(*self._at))
        self._change(closed=True)

    def _change(self, num_draining: int = 0, closed: bool = False) -> None:
        with self._lock:
            self._num_draining += num_draining
            self._is_closed = self._is_closed or closed
            if self._is_closed and not self._num_draining:
                self._done()


class RankLanes:
    """Makes the ends of lanes wherever they belong, and reads the followers' messages. See links.LaneEnds."""

    def __init__(
        self,
        local: LocalLanes,
        followers: list[Channel],
        progress: Callable[[], to.Reached],
        send: Callable[[str, wire.Body], None],
        tell: Callable[[Offered], None],
    ) -> None:
        self._local = local
        self._followers = followers
        self._progress = progress
        self._send = send
        self._tell = tell
        self._ends: dict[tuple[str, int], tuple[RemoteSend | RemoteReceive, Report]] = {}

    def send_end(
        self, conn: str, link_id: str, peer: str, index: int, lane: Lane, report: Report, note: Note
    ) -> SendEnd:
        if lane.source_rank == 0:
            return self._local.send_end(conn, link_id, peer, index, lane, report, note)
        channel = self._followers[lane.source_rank - 1]
        end = RemoteSend(self._place(conn, index, channel))
        self._ends[conn, index] = end, report
        channel.send(to.OpenSend(conn, index, link_id, peer, lane))
        return end

    def receive_end(
        self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Note
    ) -> ReceiveEnd:
        rank = opened.lanes[index].target_rank
        if rank == 0:
            return self._local.receive_end(conn, peer, opened, index, report, note)
        channel = self._followers[rank - 1]
        end = RemoteReceive(self._place(conn, index, channel))
        self._ends[conn, index] = end, report
        channel.send(to.OpenReceive(conn, index, peer, opened))
        return end

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return self._local.needs_pair(opened)

    def _place(self, conn: str, index: int, channel: Channel) -> _RemoteEnd:
        return _RemoteEnd((conn, index), channel, self._progress, partial(self._forget, conn, index))

    def _forget(self, conn: str, index: int) -> None:
        self._ends.pop((conn, index), None)

    def hear(self, message: to.OfLanes) -> None:
        """Handles a message, on a channel's thread."""
        if isinstance(message, to.Posted):
            self._send(message.conn, message.body)
            return
        if (known := self._ends.get((message.conn, message.lane))) is None:
            return  # the end was forgotten
        end, report = known
        match message:
            case to.Offers() if isinstance(end, RemoteSend):
                end.offered(message)
                self._tell(Offered(message.conn))
            case to.Counted():
                end.counted(message)
            case to.Reported(event=event):
                report(event)
                if isinstance(end, RemoteReceive):
                    end.reported(event)
