"""Applies an operator's commands to the requests of one process: they wait, end, or stop and continue later.

Knows nothing of instances or of other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from pd_cluster.cluster.records.request_timeline import Timelines
from pd_cluster.cluster.routing.request_admission import RequestAdmission
from pd_cluster.cluster.streams.request_stream import RequestStream, Setback
from pd_cluster.cluster.streams.stream_table import StreamEnd, StreamTable
from pd_cluster.errors import RequestAborted
from pd_cluster.process_messages import Gate

ABORTED = "the operator has ended this request"
KEPT = "an operator paused the cluster, and the request could not continue afterwards"


class PauseControl:
    def __init__(self, streams: StreamTable, admission: RequestAdmission, timelines: Timelines) -> None:
        self._streams, self._admission, self._timelines = streams, admission, timelines
        self._kept: dict[str, Setback | None] = {}  # request id -> setback; None: its reader has not received it yet
        self._idle: asyncio.Event | None = None  # set when the last stream ends; None: no caller waits for that
        streams.on_ended.append(self._on_ended)

    @property
    def num_kept(self) -> int:
        """Counts the requests that had begun when they were paused and wait until the gate opens."""
        return len(self._kept)

    def control_requests(self, gate: Gate, aborts: Collection[str] | None, keeps: bool) -> None:
        """Implements `ServingProcesses.control_requests` (members/cluster_control.py)."""
        self._admission.set_gate(gate)
        if gate == "open":
            self._release()
        elif keeps:
            for stream in self._streams:
                if not stream.is_finished:
                    self._kept.setdefault(stream.request_id)
                    self._streams.move(stream, KEPT)
        if aborts is not None:
            self._abort(aborts)

    def _abort(self, names: Collection[str]) -> None:
        for stream in self._streams:
            timeline = self._timelines.find(stream.request_id)
            if not names or (timeline is not None and not set(names).isdisjoint(timeline.ids)):
                stream.inbox.put(RequestAborted(ABORTED, code="aborted"))
        if not names:
            self._admission.end_waiting(RequestAborted(ABORTED, code="aborted"))

    def _release(self) -> None:
        kept, self._kept = self._kept, {}
        for request_id, setback in kept.items():
            if setback is not None:
                stream = self._streams.find(request_id)
                assert stream is not None, "the end of a stream removes its entry"
                stream.inbox.put(setback)

    def keeps(self, stream: RequestStream, setback: Setback | None = None) -> bool:
        """Whether a pause makes the stream wait; if so, its reader receives `setback` again when it may continue."""
        if stream.request_id not in self._kept:
            return False
        if setback is not None:
            self._kept[stream.request_id] = setback
        return True

    def _on_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        self._kept.pop(stream.request_id, None)
        if self._idle is not None and len(self._streams) == len(self._kept):
            self._idle.set()
            self._idle = None

    async def until_idle(self) -> None:
        """Waits until no instance has a request."""
        while len(self._streams) > len(self._kept):
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()
