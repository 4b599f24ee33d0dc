"""Keeps a process's streams by id, from the choice of a pair to the end, and publishes events about them. Single tokens
cause no events. Knows nothing of instances' messages or of queues.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from pd_cluster.cluster.records.request_stats import ReplayCause, RequestStats
from pd_cluster.cluster.streams.request_origin import AdmittedRequest, RequestOrigin
from pd_cluster.cluster.streams.request_stream import Ending, RequestStream, Send, Setback
from pd_cluster.errors import GenerationError
from pd_cluster.types import RequestSpec

TAKEN = "another reader has taken this stream over"

StreamCallback = Callable[[RequestStream], None]
Afterwards = Literal["abort", "leave", "go on", "stop", "forget"]  # the last three are for kept streams


class StreamEnd(NamedTuple):
    """How a stream ended for its reader. `error`: what ended it, or None."""

    how: Ending
    error: BaseException | None
    then: Afterwards


class StreamTable:
    """`send` and `stats` are passed to its streams.

    Each `on_…` is an event: a list of functions to call, in order; collaborators append theirs when they are
    constructed.
    """

    def __init__(self, send: Send, stats: RequestStats) -> None:
        self._send, self._stats = send, stats
        self._life, self._counter = secrets.token_hex(4), itertools.count()
        self._by_id: dict[str, RequestStream] = {}
        self.on_opened: list[StreamCallback] = []  # the request has its pair, and nothing was sent to it yet
        self.on_begun: list[StreamCallback] = []  # the reader has its first token
        self.on_leg_ended: list[Callable[[], None]] = []  # an instance has less to do
        # the attempt's outputs are no longer needed, even if its legs still run
        self.on_attempt_over: list[StreamCallback] = []
        # the stream has another pair, after this setback
        self.on_moved: list[Callable[[RequestStream, Setback], None]] = []
        self.on_ended: list[Callable[[RequestStream, StreamEnd], None]] = []  # once for each opened stream
        # a bound method, because it is called for every token
        self.find: Callable[[str], RequestStream | None] = self._by_id.get

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestStream]:
        """Iterates over a snapshot of the streams."""
        return iter(list(self._by_id.values()))

    def __contains__(self, stream: object) -> bool:
        return isinstance(stream, RequestStream) and self._by_id.get(stream.request_id) is stream

    def open(self, order: RequestSpec, origin: RequestOrigin, admitted: AdmittedRequest) -> RequestStream:
        """Adds a request that has its pair. A resumed request keeps its id, and takes the stream over from an
        earlier reader.
        """
        place = origin.kept.place if origin.kept is not None else None
        request_id = f"{self._life}-{next(self._counter)}" if place is None else place.found.request_id
        if (before := self._by_id.get(request_id)) is not None:  # found by two readers at once
            self.take_over(before, "leave")
        stream = self._by_id[request_id] = RequestStream(request_id, order, origin, admitted, self._send, self._stats)
        for tell in self.on_opened:
            tell(stream)
        return stream

    def begun(self, stream: RequestStream) -> None:
        """Records that the reader has the first token."""
        if stream in self:
            for tell in self.on_begun:
                tell(stream)

    def leg_ended(self) -> None:
        for tell in self.on_leg_ended:
            tell()

    def give_up(self, stream: RequestStream) -> None:
        """Ends a stream whose reader has fallen too far behind. The reader may still take the items that have arrived,
        and then this error.
        """
        self._end_attempt(stream)
        stream.inbox.put(GenerationError(f"the client has more than {stream.max_unread} unread tokens"))

    def retreat(self, stream: RequestStream, error: GenerationError, cause: ReplayCause) -> None:
        """Ends a failed attempt; its reader looks for another pair."""
        self._end_attempt(stream)
        stream.retreat(error, cause)

    def move(self, stream: RequestStream, why: str) -> None:
        """Ends an attempt that has not failed; its reader looks for another pair."""
        stream.num_moves += 1
        self.retreat(stream, GenerationError(why), "moved")

    def moved(self, stream: RequestStream, setback: Setback) -> None:
        """Records that the reader has found another pair."""
        for tell in self.on_moved:
            tell(stream, setback)

    def take_over(self, stream: RequestStream, then: Literal["go on", "leave"]) -> None:
        """Ends a stream for its reader, because another reader takes over."""
        taken = GenerationError(TAKEN)
        self._forget(stream, StreamEnd(stream.how_ended(taken), taken, then))  # now: the next stream may have this id
        stream.inbox.put(taken)

    def end(self, stream: RequestStream, end: StreamEnd) -> None:
        """Ends a stream whose reader has finished or left; does nothing if the stream was taken over."""
        stream.drop_hold()
        if stream in self:
            self._forget(stream, end)

    def _end_attempt(self, stream: RequestStream) -> None:
        for tell in self.on_attempt_over:
            tell(stream)

    def _forget(self, stream: RequestStream, end: StreamEnd) -> None:
        del self._by_id[stream.request_id]
        for tell in self.on_ended:
            tell(stream, end)
