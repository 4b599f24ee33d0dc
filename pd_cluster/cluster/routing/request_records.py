"""Records streams as they begin, move and end: in counters, in timelines, in the log."""

from __future__ import annotations

import logging

from pd_cluster.cluster.records.adapter_counts import AdapterCounts
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.records.request_timeline import RequestNames, Timelines
from pd_cluster.cluster.streams.request_stream import RequestStream, Setback
from pd_cluster.cluster.streams.stream_table import StreamEnd, StreamTable
from pd_cluster.errors import PdClusterError, RequestAborted
from pd_cluster.types import FinishReason

log = logging.getLogger(__name__)


class RequestRecords:
    """Listens to `streams`. `adapters` counts a request from its arrival, before it has a stream."""

    def __init__(
        self, streams: StreamTable, stats: RequestStats, timelines: Timelines, adapters: AdapterCounts
    ) -> None:
        self._stats, self._timelines, self._adapters = stats, timelines, adapters
        streams.on_opened.append(self._on_opened)
        streams.on_begun.append(self._on_begun)
        streams.on_moved.append(self._on_moved)
        streams.on_ended.append(self._on_ended)

    def _on_opened(self, stream: RequestStream) -> None:
        prefill, decode = ((instance.conn, instance.name) for instance in (stream.prefill, stream.decode))
        origin, num_tokens = stream.origin, len(stream.order.prompt_token_ids)
        names = RequestNames(stream.request_id, stream.transfer_id, origin.client_id)
        self._timelines.routed(names, origin.received_s, num_tokens, prefill, decode)

    def _on_begun(self, stream: RequestStream) -> None:
        heard_s = stream.heard_s + stream.held_s  # the hold for decode does not count as a delay in this process
        self._timelines.first_token(stream.request_id, heard_s, stream.first_s if stream.order.gathers else None)
        self._adapters.begins(stream.order.variant)

    def _on_moved(self, stream: RequestStream, setback: Setback) -> None:
        name, why = stream.decode.name, str(setback.error)
        shown = {"request_id": self._timelines.shown_id(stream.request_id)}
        log.info("request %s continues at %s: %s", stream.request_id, name, why, extra=shown)
        self._timelines.replayed(stream.request_id, stream.transfer_id, stream.decode.conn, name, why)
        self._stats.replayed(setback.cause)

    def _on_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        """Counts unfinished sequences as aborted by the reader, unless an error ended them."""
        self._adapters.ends(stream.order.variant, stream.has_begun)
        timeline = self._timelines.find(stream.request_id)
        admitted_s = timeline.admitted_s(stream.first_s) if timeline is not None else None
        handovers_s = timeline.handovers_s() if timeline is not None else []
        is_fault = isinstance(end.error, PdClusterError) and not isinstance(end.error, RequestAborted)
        left: FinishReason = "error" if is_fault else "abort"
        outcome = stream.outcome(left, admitted_s, handovers_s)
        self._stats.ended(outcome)
        self._timelines.ended(stream.request_id, "" if stream.is_over else _why(end.error), outcome)


def _why(error: BaseException | None) -> str:
    """Returns why a request ended before all its sequences had; without an error, its client has left."""
    return str(error) if isinstance(error, PdClusterError) else "the client left before the end"
