"""Sends OpenTelemetry traces of requests to a collector over HTTP. Only this module knows opentelemetry.

A request's own span begins with its headers and ends with its answer. The spans below it are written soon after the
answer, when the workers have reported their parts (cluster/records/request_spans.py). OpenTelemetry's own environment
variables apply: service name, headers, certificates, sampler, batch sizes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from uuid import uuid4

from pd_cluster import __version__
from pd_cluster.cluster.records.request_spans import (
    Names,
    TraceSpan,
    Value,
    has_failed,
    is_reported,
    spans_of,
    usage_of,
)
from pd_cluster.cluster.records.request_stats import Outcome
from pd_cluster.cluster.records.request_timeline import Timeline
from pd_cluster.errors import ConfigError, called

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as Recorded

PARENT, STATE = "traceparent", "tracestate"
LOOK_S = 0.1  # the interval of checks for the workers' reports after the end
REPORT_TIMEOUT_S = 2.0  # the longest wait for these reports; killed workers send none
FLUSH_TIMEOUT_S = 3.0  # the longest wait of a stopping server for its collector
EXPORT_TIMEOUT_S = 10.0
PROVIDER = "pd-cluster"


def check_packages(endpoint: str) -> None:
    """Raises ConfigError if traces are enabled but cannot be sent."""
    modules = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    try:
        missing = [each for each in modules if find_spec(each) is None] if endpoint else []
    except ModuleNotFoundError:
        missing = list(modules)
    if missing:
        where = f"{called('otlp_traces_endpoint')} {endpoint}"
        raise ConfigError(f"{where}: {missing[0]} is not installed; pip install 'pd-cluster[otel]'")


class RequestTrace:
    """The trace of one HTTP request. `headers`: for its answer."""

    def __init__(
        self, tracing: Tracing, operation: str, span: Recorded, context: Context, headers: dict[str, str]
    ) -> None:
        self._tracing, self._operation, self.span, self._context = tracing, operation, span, context
        self.headers, self._model = headers, ""
        self._offset_s = time.time() - time.monotonic()  # fixed for the whole request, even if the clock is changed
        self._ended: list[tuple[Timeline, Outcome]] = []

    @property
    def is_recorded(self) -> bool:
        return self.span.is_recording()

    def note(self, name: str, value: Value) -> None:
        self.span.set_attribute(name, value)

    def asks(self, model: str) -> None:
        self._model = model

    def follow(self, timeline: Timeline) -> None:
        self.note(Names.RESPONSE_ID, timeline.ids[0])

    def ended(self, timeline: Timeline, outcome: Outcome) -> None:
        self._ended.append((timeline, outcome))
        self._tracing.await_reports(self, timeline, outcome)

    def end(self, status: int, error: str = "") -> None:
        """Ends the request's own span. `status`: the HTTP status; 0: the client left before the answer."""
        from opentelemetry.trace import Status, StatusCode

        if self._ended:
            self.span.set_attributes(usage_of(self._ended))
            error = error or ("generation_failed" if any(has_failed(outcome) for _, outcome in self._ended) else "")
        if status:
            self.note(Names.STATUS, status)
        error = error or (str(status) if status >= 400 else "")
        if error:
            self.note(Names.ERROR, error)
        if error and not 400 <= status < 500:
            self.span.set_status(Status(StatusCode.ERROR))
        if self._model:
            self.note(Names.REQUEST_MODEL, self._model)
            self.note(Names.RESPONSE_MODEL, self._model)
            self.span.update_name(f"{self._operation} {self._model}")
        self.span.end()

    def write(self, timeline: Timeline, outcome: Outcome) -> None:
        """Records the spans below the request's own."""
        for span in spans_of(timeline, outcome):
            self._write(span, self._context)

    def _write(self, span: TraceSpan, parent: Context) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        recorded = self._tracing.tracer.start_span(
            span.name, parent, attributes=span.attributes, start_time=self._ns(span.start_s)
        )
        for at_s, what, numbers in span.events:
            recorded.add_event(what, numbers, self._ns(at_s))
        if span.error:
            recorded.set_status(Status(StatusCode.ERROR, span.error))
        for part in span.parts:
            self._write(part, set_span_in_context(recorded, parent))
        recorded.end(self._ns(span.end_s))

    def _ns(self, at_s: float) -> int:
        return round((at_s + self._offset_s) * 1e9)


class Tracing:
    """Must be created on the serving process's event loop. A separate thread exports spans from a bounded queue."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError if packages are missing."""
        check_packages(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = {"service.version": __version__, "service.instance.id": str(uuid4())}
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            own["service.name"] = "pd-cluster"
        self._provider: TracerProvider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        self.tracer = self._provider.get_tracer("pd_cluster", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._waiting: dict[asyncio.TimerHandle, tuple[RequestTrace, Timeline, Outcome]] = {}
        self._loop = asyncio.get_running_loop()

    def begin(self, operation: str, path: str, headers: Mapping[str, str]) -> RequestTrace:
        """Begins a request's span. `headers`: the client's trace headers."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._propagator.extract(headers)
        span = self.tracer.start_span(
            operation,
            parent,
            kind=SpanKind.SERVER,
            attributes={
                Names.OPERATION: operation,
                Names.PROVIDER: PROVIDER,
                Names.METHOD: "POST",
                Names.PATH: path,
            },
        )
        context = set_span_in_context(span, parent)
        told: dict[str, str] = {}
        self._propagator.inject(told, context)
        return RequestTrace(self, operation, span, context, told)

    def await_reports(self, trace: RequestTrace, timeline: Timeline, outcome: Outcome, waited_s: float = 0.0) -> None:
        """Writes a request's spans when its workers have reported their ends, or after REPORT_TIMEOUT_S."""
        if waited_s >= REPORT_TIMEOUT_S or is_reported(timeline):
            trace.write(timeline, outcome)
            return

        def look() -> None:
            del self._waiting[handle]
            self.await_reports(trace, timeline, outcome, waited_s + LOOK_S)

        handle = self._loop.call_later(LOOK_S, look)
        self._waiting[handle] = trace, timeline, outcome

    async def close(self) -> None:
        """Writes pending spans, and sends them if the collector answers in time."""
        for handle, (trace, timeline, outcome) in self._waiting.items():
            handle.cancel()
            trace.write(timeline, outcome)
        self._waiting.clear()
        flushed = asyncio.Event()

        def flush() -> None:
            self._provider.force_flush()
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                self._loop.call_soon_threadsafe(flushed.set)

        # A separate daemon thread, because force_flush has no timeout, and exit would wait for the loop's executor.
        threading.Thread(target=flush, name="traces-flush", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await flushed.wait()
