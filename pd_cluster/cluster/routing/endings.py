"""How a stream or one of its attempts ends early: taken over, given up, moved; and what is noted of any end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pd_cluster.cluster.routing.dispatch import Dispatch
from pd_cluster.cluster.routing.stats import ReplayCause, RequestStats
from pd_cluster.cluster.routing.stream import RequestStream
from pd_cluster.cluster.routing.timeline import Timelines
from pd_cluster.errors import GenerationError, PdClusterError, RequestAborted
from pd_cluster.types import FinishReason

TAKEN = "another reader has taken this stream over"


class Endings:
    """`streams`: the router's, by their ids. `forget`: tells an operator's commands that one of them is gone."""

    def __init__(
        self,
        streams: dict[str, RequestStream],
        dispatch: Dispatch,
        stats: RequestStats,
        timelines: Timelines,
        forget: Callable[[RequestStream], None],
    ) -> None:
        self._streams, self._dispatch, self._forget = streams, dispatch, forget
        self._stats, self._timelines = stats, timelines

    def take(self, stream: RequestStream, then: Literal["go on", ""]) -> None:
        """Ends a stream for its reader, because it has another one. `then`: as the instance is to be told."""
        del self._streams[stream.request_id]
        self._forget(stream)
        if then:
            self._dispatch.release(stream, then)
        else:
            self._dispatch.leave(stream)
        taken = GenerationError(TAKEN)
        self.note(stream, taken)  # now: its successor may have its name
        stream.inbox.put(taken)

    def note(self, stream: RequestStream, error: BaseException | None) -> None:
        """Records the request's end; unfinished sequences count as aborted by the reader, unless an error ended it."""
        timeline = self._timelines.find(stream.request_id)
        admitted_s = timeline.admitted_s(stream.first_s) if timeline is not None else None
        handovers_s = timeline.handovers_s() if timeline is not None else []
        is_fault = isinstance(error, PdClusterError) and not isinstance(error, RequestAborted)
        left: FinishReason = "error" if is_fault else "abort"
        outcome = stream.outcome(left, admitted_s, handovers_s)
        self._stats.ended(outcome)
        self._timelines.ended(stream.request_id, "" if stream.is_over else _why(error), outcome)

    def give_up(self, stream: RequestStream) -> None:
        """Ends a stream that is not read. The reader may still take what has arrived, and then the reason."""
        self._dispatch.abort(stream)
        stream.inbox.put(GenerationError(f"the client leaves more than {stream.max_unread} tokens unread"))

    def retreat(self, stream: RequestStream, error: GenerationError, cause: ReplayCause) -> None:
        """Ends a failed attempt, whatever its other leg still does."""
        self._dispatch.abort(stream)
        stream.retreat(error, cause)

    def move(self, stream: RequestStream, why: str) -> None:
        """Ends an attempt that has not failed."""
        stream.num_moves += 1
        self.retreat(stream, GenerationError(why), "moved")


def _why(error: BaseException | None) -> str:
    """Returns why a request ended before all its sequences had; without an error of ours, its reader has left."""
    return str(error) if isinstance(error, PdClusterError) else "the client left before the end"
