"""Keeps the events of the last requests, by this process's clock.

Workers report events by their own clocks. A message cannot arrive before it was sent, so of all differences between a
message's arrival by this clock and its sending by the worker's clock, the smallest is nearest to the clocks' true
offset. Keeps a bounded number of requests and events. Knows nothing of HTTP or ZeroMQ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from pd_cluster.cluster.records.request_stats import Outcome
from pd_cluster.wire import TraceEvent

MAX_REQUESTS = 1000
MAX_EVENTS = 2000  # per request
MAX_ALL_EVENTS = 200_000  # in total; beyond that the oldest requests are dropped
NUM_SPARED = 100  # places among a request's events that are reserved for events that occur once
REPEATED = frozenset({"chunk", "sent", "landed"})

TimelineStatus = Literal["running", "finished", "failed"]


class RequestFollower(Protocol):
    """Is notified of the requests that are made in its context. Workers may report events even after a request has
    ended.
    """

    def asks(self, model: str) -> None: ...

    def follow(self, timeline: Timeline) -> None: ...

    def ended(self, timeline: Timeline, outcome: Outcome) -> None: ...


FOLLOWER: ContextVar[RequestFollower | None] = ContextVar("pd_cluster.follower", default=None)


@dataclass(slots=True)
class WorkerClock:
    """The clock of one connection's worker. `offset_s` converts its times to this process's; the results are late by
    the travel time of the fastest message.
    """

    conn: str
    offset_s: float = float("inf")

    def heard(self, now_s: float, arrival_s: float) -> None:
        self.offset_s = min(self.offset_s, arrival_s - now_s)


@dataclass(slots=True)
class Timeline:
    """One request. `ids` are all its names; the one that clients see comes first."""

    ids: list[str]
    num_prompt_tokens: int
    received_s: float
    prefill: str
    decode: str
    members: Mapping[str, str]  # conn -> name, of the instances that serve it
    status: TimelineStatus = "running"
    error: str = ""
    ended_s: float | None = None
    added_s: float = 0.0  # the part of the time to the first token that was spent in this process
    own: list[tuple[float, str]] = field(default_factory=list)  # the scheduler's events
    others: list[tuple[WorkerClock, TraceEvent]] = field(default_factory=list)
    num_dropped: int = 0
    reasons: list[str] = field(default_factory=list)  # why each attempt except the last ended
    follower: RequestFollower | None = None

    def add(self, clock: WorkerClock, event: TraceEvent) -> bool:
        """Adds an event; returns False when the limit is reached."""
        limit = MAX_EVENTS - (NUM_SPARED if event.what in REPEATED else 0)
        if len(self.others) >= limit:
            self.num_dropped += 1
            return False
        self.others.append((clock, event))
        return True

    def events(self) -> list[dict[str, Any]]:
        """Returns events in order of time; events of one process at the same time stay in the order in which it
        reported them.
        """
        found = [(at_s, "scheduler", what, dict[str, int]()) for at_s, what in self.own]
        found += [(e.at_s + clock.offset_s, self.members[clock.conn], e.what, e.numbers) for clock, e in self.others]
        found.sort(key=lambda event: event[0])
        return [
            {"at_ms": self._ms(at_s), "who": who, "what": what, "numbers": numbers}
            for at_s, who, what, numbers in found
        ]

    def admitted_s(self, before_s: float) -> float | None:
        """Returns when a prefill instance had room for the prompt, in the attempt that was running at `before_s`."""
        told = [event.at_s + clock.offset_s for clock, event in self.others if event.what == "admitted"]
        return max((at_s for at_s in told if at_s <= before_s), default=min(told, default=None))

    def handovers_s(self) -> list[float]:
        """Returns each finished handover's duration, from offer to confirmation, by the receiver's clock."""
        offered: dict[tuple[str, str], float] = {}
        landed: set[tuple[str, str]] = set()
        took_s = []
        for clock, event in self.others:
            key = clock.conn, event.transfer_id
            if event.what == "offered":
                offered[key] = event.at_s
            elif event.what == "landing complete":
                landed.add(key)
            elif event.what == "confirmed" and key in landed and key in offered:
                took_s.append(event.at_s - offered[key])
        return took_s

    def to_json(self) -> dict[str, Any]:
        """Returns the body of `/requests/{id}/timeline`."""
        return {
            "request_id": self.ids[0],
            "ids": self.ids,
            "prefill": self.prefill,
            "decode": self.decode,
            "num_prompt_tokens": self.num_prompt_tokens,
            "status": self.status,
            "error": self.error or None,
            "num_dropped_events": self.num_dropped,
            "events": self.events(),
        }

    def summary(self, now_s: float) -> dict[str, Any]:
        """Returns one entry of `/requests`."""
        return {
            "request_id": self.ids[0],
            "status": self.status,
            "age_s": round(now_s - self.received_s, 3),
            "prefill": self.prefill,
            "decode": self.decode,
            "num_prompt_tokens": self.num_prompt_tokens,
            "added_ttft_ms": round(1e3 * self.added_s, 3),
            "num_replays": sum(what == "replayed" for _, what in self.own),
            "duration_ms": None if self.ended_s is None else self._ms(self.ended_s),
        }

    def _ms(self, at_s: float) -> float:
        return round((at_s - self.received_s) * 1e3, 3)


class RequestNames(NamedTuple):
    """The router's name of a request, that of its first transfer, and the client's."""

    request_id: str
    transfer_id: str
    client_id: str


class Timelines:
    """The last requests. `heard` may be called on another thread, since it only lowers an offset."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_requests: int = MAX_REQUESTS,
        max_all_events: int = MAX_ALL_EVENTS,
    ) -> None:
        self.max_requests = max_requests
        self._max_all_events = max_all_events
        self._clock = clock
        self._kept: dict[str, Timeline] = {}  # by the router's id, oldest first
        self._by_id: dict[str, Timeline] = {}  # by each of its ids
        self._clocks: dict[str, WorkerClock] = {}  # by connection
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._kept)

    # ---- calls by the router

    def routed(
        self,
        names: RequestNames,
        received_s: float | None,
        num_prompt_tokens: int,
        prefill: tuple[str, str],
        decode: tuple[str, str],
    ) -> None:
        """Adds a new request; `prefill` and `decode` are (connection, name)."""
        now_s = self._clock()
        received_s = now_s if received_s is None else received_s
        ids = [each for each in (names.client_id, names.request_id, names.transfer_id) if each]
        timeline = Timeline(ids, num_prompt_tokens, received_s, prefill[1], decode[1], dict([prefill, decode]))
        timeline.own += [(received_s, "received"), (now_s, "routed")]
        timeline.added_s = now_s - received_s
        if (follower := FOLLOWER.get()) is not None:
            timeline.follower = follower
            follower.follow(timeline)
        self._kept[names.request_id] = timeline
        self._by_id.update(dict.fromkeys(ids, timeline))
        while len(self._kept) > self.max_requests:
            self._drop_oldest()

    def replayed(self, request_id: str, transfer_id: str, conn: str, name: str, why: str = "") -> None:
        """Records that the request continues at an instance, and `why` its previous attempt ended."""
        if timeline := self._kept.get(request_id):
            timeline.own.append((self._clock(), "replayed"))
            timeline.reasons.append(why)
            timeline.ids.append(transfer_id)
            timeline.members = {**timeline.members, conn: name}
            self._by_id[transfer_id] = timeline

    def first_token(self, request_id: str, heard_s: float, had_s: float | None = None) -> None:
        """Records that the reader got the first token, at `had_s` or just now; this process had received it at
        `heard_s`.
        """
        if timeline := self._kept.get(request_id):
            had_s = self._clock() if had_s is None else had_s
            timeline.own.append((had_s, "first token"))
            timeline.added_s += had_s - heard_s

    def now_s(self) -> float:
        """Returns the current time by this clock."""
        return self._clock()

    def ended(self, request_id: str, error: str = "", outcome: Outcome | None = None) -> None:
        if timeline := self._kept.get(request_id):
            timeline.ended_s = self._clock()
            timeline.status, timeline.error = ("failed", error) if error else ("finished", "")
            timeline.own.append((timeline.ended_s, timeline.status))
            if timeline.follower is not None and outcome is not None:
                timeline.follower.ended(timeline, outcome)

    # ---- events from workers

    def heard(self, conn: str, now_s: float) -> float:
        """Records a message sent at `now_s` of the worker's clock. Returns its arrival time by this clock."""
        arrival_s = self._clock()
        clock = self._clocks.get(conn)
        if clock is None:
            clock = self._clocks[conn] = WorkerClock(conn)
        clock.heard(now_s, arrival_s)
        return arrival_s

    def gone(self, conn: str) -> None:
        """Removes a closed connection; events that it reported keep its clock."""
        self._clocks.pop(conn, None)

    def add(self, conn: str, events: list[TraceEvent]) -> None:
        """Adds events of known requests that the reporting worker serves."""
        clock = self._clocks.get(conn)
        for event in events if clock is not None else []:
            timeline = self._by_id.get(event.transfer_id)
            if timeline is None or clock is None or conn not in timeline.members:
                continue
            self._num_events += timeline.add(clock, event)
        while self._num_events > self._max_all_events and len(self._kept) > 1:
            self._drop_oldest()

    # ---- queries

    def find(self, any_id: str) -> Timeline | None:
        return self._by_id.get(any_id)

    def shown_id(self, request_id: str) -> str:
        """Returns the id that the client sees."""
        return timeline.ids[0] if (timeline := self._kept.get(request_id)) else request_id

    def last(self, limit: int) -> list[dict[str, Any]]:
        """Returns summaries, newest first."""
        now_s = self._clock()
        newest = list(self._kept.values())[::-1][:limit]
        return [timeline.summary(now_s) for timeline in newest]

    def _drop_oldest(self) -> None:
        timeline = self._kept.pop(next(iter(self._kept)))
        self._num_events -= len(timeline.others)
        for each in timeline.ids:
            if self._by_id.get(each) is timeline:
                del self._by_id[each]
