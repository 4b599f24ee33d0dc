"""Rank 0's proxies for ends of lanes on other ranks: calls become messages (lane_calls.py).

The engine's thread makes the calls, except `put` and `meet`, which the mailbox's thread makes. The threads of the
followers' channels read the followers' messages; they only update counts or pass messages on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Offered
from pd_cluster.engine.handover.links.link_ends import LinkName, LocalLanes, ReceiveEnd, SendEnd
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.lane_calls import RECEIVE_CALLS, SEND_CALLS, LaneCalls
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.kv.kv_layout import KVLayout, Lane
from pd_cluster.transport.link_events import Drained, LinkEvent, Report
from pd_cluster.types import Note


class _Place(NamedTuple):
    """Locates an end on another rank."""

    at: tuple[str, int]  # connection and lane
    channel: Channel  # the channel to that rank
    progress: Callable[[], to.Reached]  # this rank's progress
    done: Callable[[], None]  # called when no more messages will come


class _RemoteEnd:
    """An end on another rank. Each method in `calls` that is not defined here becomes a message."""

    calls: ClassVar[LaneCalls]

    def __init__(self, place: _Place) -> None:
        self._at, self._channel, self._progress, self._done = place

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method not in self.calls:
            raise AttributeError(f"{type(self).__name__} has no {method}")
        return partial(self._call, method)

    def _call(self, method: str, *arguments: object) -> None:
        self._channel.send(self.calls.message(self._at, method, arguments, self._progress))


class RemoteSend(_RemoteEnd):
    """P's end of a lane on another rank. See link_ends.SendEnd."""

    calls = SEND_CALLS

    def __init__(self, place: _Place) -> None:
        super().__init__(place)
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
        self._call("open", transport, own, peer)

    def close(self) -> None:
        self._call("close")
        self._done()


class RemoteReceive(_RemoteEnd):
    """D's end of a lane on another rank. See link_ends.ReceiveEnd."""

    calls = RECEIVE_CALLS
    precision = ""  # only the local lane reports its precision

    def __init__(self, place: _Place) -> None:
        super().__init__(place)
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

    def forget(self, transfer_id: str) -> None:
        self._change(num_draining=1)
        self._call("forget", transfer_id)

    def close(self) -> None:
        self._call("close")
        self._change(closed=True)

    def _change(self, num_draining: int = 0, closed: bool = False) -> None:
        with self._lock:
            self._num_draining += num_draining
            self._is_closed = self._is_closed or closed
            if self._is_closed and not self._num_draining:
                self._done()


class RankLanes:
    """Creates the ends of lanes on their ranks, and handles followers' messages about them.

    Implements link_ends.LaneEnds.
    """

    def __init__(
        self,
        local: LocalLanes,
        followers: Sequence[Channel],
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

    def send_end(self, link: LinkName, index: int, lane: Lane, report: Report, note: Note) -> SendEnd:
        if lane.source_rank == 0:
            return self._local.send_end(link, index, lane, report, note)
        channel = self._followers[lane.source_rank - 1]
        end = RemoteSend(self._place(link.conn, index, channel))
        self._ends[link.conn, index] = end, report
        channel.send(to.OpenSend(link.conn, index, link.link_id, link.peer, lane))
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

    def _place(self, conn: str, index: int, channel: Channel) -> _Place:
        return _Place((conn, index), channel, self._progress, partial(self._forget, conn, index))

    def _forget(self, conn: str, index: int) -> None:
        self._ends.pop((conn, index), None)

    def hear(self, message: to.OfLanes) -> None:
        """Handles a follower's message, on the thread of its channel."""
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
