"""Starts batch requests one by one, when interactive requests leave capacity."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from pd_cluster.cluster.placement.spare_capacity import ANYTHING_FITS, spare_capacity
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.cluster.streams.stream_table import StreamEnd
from pd_cluster.service.files.batch_throttle import BatchThrottle, ClusterCapacity
from pd_cluster.types.request_spec import BATCH_PRIORITY

POLL_S = 0.01  # the polling interval while a batch request waits


class LineAdmission:
    """Listens to a router's streams. `may_begin`: returns False when no further request may begin."""

    def __init__(
        self,
        router: Router,
        throttle: BatchThrottle,
        may_begin: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router, self._throttle, self._may_begin, self._clock = router, throttle, may_begin, clock
        self._without_token: dict[str, RequestStream] = {}
        self._first = asyncio.Lock()  # its holder's request begins next
        streams = router.streams
        streams.on_opened.append(self._on_opened)
        streams.on_ended.append(self._on_ended)

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Waits until a request may begin, and notes its end."""
        async with self._first:
            while not self._may_begin_now():
                await asyncio.sleep(POLL_S)
            self._throttle.begins()
        try:
            yield
        finally:
            self._throttle.ends()

    def _may_begin_now(self) -> bool:
        for stream in [*self._without_token.values()]:
            if stream.heard_s:  # the prompt has been computed, although its token may not have been read yet
                self._note_token(stream, stream.heard_s)
        return self._may_begin() and self._throttle.may_begin(self._clock(), self._capacity())

    def _note_token(self, stream: RequestStream, at_s: float) -> None:
        self._without_token.pop(stream.request_id, None)
        self._throttle.has_token(stream.request_id, at_s)

    def _capacity(self) -> ClusterCapacity:
        instances = [each for each in self._router.membership.instances if each.takes_requests]
        free = spare_capacity(instances)
        prefills = [each for each in instances if each.role == "prefill"] or instances
        places = sum(each.num_slots for each in instances if each.role != "prefill")
        is_free = bool(instances) and free == ANYTHING_FITS and not self._router.num_waiting
        return ClusterCapacity(len(prefills), places, is_free)

    def _on_opened(self, stream: RequestStream) -> None:
        if _is_of_batch(stream):
            self._without_token[stream.request_id] = stream
            self._throttle.sent(stream.request_id, self._clock())
        else:
            self._throttle.interactive_begins(self._clock())

    def _on_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        if _is_of_batch(stream):
            self._note_token(stream, stream.heard_s or self._clock())
        else:
            self._throttle.interactive_ends(self._clock())


def _is_of_batch(stream: RequestStream) -> bool:
    return stream.order.priority > BATCH_PRIORITY // 2
