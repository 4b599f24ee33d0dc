"""An OpenTelemetry collector over HTTP: decodes the received protobuf messages and keeps their spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

ERROR = 2  # code of a span's status


@dataclass(frozen=True)
class Seen:
    """One received span; times in ns."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    told: str
    events: list[str]
    service: str


@dataclass
class Collector:
    url: str = ""
    spans: list[Seen] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        found = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self.changed:
            self.spans += found
            self.changed.notify_all()

    def _of(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def awaited(self, trace_id: str, is_whole: Callable[[list[Seen]], bool], timeout_s: float = 40) -> list[Seen]:
        """Waits until `is_whole` accepts a trace's spans; returns them in order of their start."""
        with self.changed:
            is_there = self.changed.wait_for(lambda: is_whole(self._of(trace_id)), timeout_s)
            assert is_there, [span.name for span in self._of(trace_id)]
            return sorted(self._of(trace_id), key=lambda span: span.start_ns)


def _value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    found = getattr(any_value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


def _spans(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for of_resource in request.resource_spans:
        resource = {each.key: _value(each.value) for each in of_resource.resource.attributes}
        for span in (span for scope in of_resource.scope_spans for span in scope.spans):
            yield Seen(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.trace_state,
                span.kind,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                {each.key: _value(each.value) for each in span.attributes},
                span.status.code == ERROR,
                span.status.message,
                [event.name for event in span.events],
                resource["service.name"],
            )


@contextmanager
def collector() -> Iterator[Collector]:
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["Content-Type"] == "application/x-protobuf"
            made.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
