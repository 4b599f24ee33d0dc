"""Traces of requests at the public port without a cluster, received by a collector that decodes the protocol."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.trace_middleware import OPERATIONS
from pd_cluster.cluster.records.request_spans import Names
from pd_cluster.errors import ConfigError
from pd_cluster.service import request_traces
from pd_cluster.service.request_traces import Tracing, check_packages
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.serve_options import ServeOptions
from tests.support.otlp_collector import Collector, collector
from tests.support.public_port import make_app, send

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
URL = "http://127.0.0.1:4318/v1/traces"


@pytest.fixture
def received() -> Iterator[Collector]:
    with collector() as made:
        yield made


def asked(folder: Path, url: str, flags: str) -> dict[str, str]:
    """Sends requests that cannot be served, some without a trace; returns the first answer's headers."""

    async def run() -> dict[str, str]:
        tracing = Tracing(url)
        app, _ = make_app(folder, HttpConfig(api_keys=("k",)), tracing=tracing)
        key, parent = ("authorization", "Bearer k"), ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{flags}")
        body = {"prompt": "x", "max_tokens": 1, "model": "tiny"}
        answer = await send(app, "POST", "/v1/completions", [key, parent, ("tracestate", "a=1")], body)
        assert answer.status == 503
        for path, headers in (("/v1/completions", [parent]), ("/v1/models", [key, parent])):
            assert "traceparent" not in (await send(app, "POST", path, headers, body)).headers
        await tracing.close()
        return answer.headers

    return asyncio.run(run())


def test_a_request_is_a_span_of_the_clients_trace(tmp_path: Path, received: Collector) -> None:
    headers = asked(tmp_path, f"{received.url}/v1/traces", "01")
    (span,) = received.spans
    known = ("text_completion tiny", TRACE_ID, PARENT_ID, "a=1")
    assert (span.name, span.trace_id, span.parent_id, span.trace_state) == known
    assert headers["traceparent"] == f"00-{TRACE_ID}-{span.span_id}-01"
    assert headers["tracestate"] == "a=1"
    assert (span.attributes[Names.STATUS], span.attributes[Names.ERROR], span.is_error) == (503, "503", True)
    assert "x" not in span.attributes.values(), "no prompt"


def test_a_client_that_does_not_sample_is_obeyed(tmp_path: Path, received: Collector) -> None:
    headers = asked(tmp_path, f"{received.url}/v1/traces", "00")
    assert re.fullmatch(f"00-{TRACE_ID}-[0-9a-f]+-00", headers["traceparent"])
    assert received.spans == []


def test_a_collector_that_never_answers_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_traces, "FLUSH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(request_traces, "EXPORT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def run() -> None:
            tracing = Tracing(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
            tracing.begin("chat", "/v1/chat/completions", {}).end(200)
            await tracing.close()
            assert not any(thread.name == "traces-flush" and not thread.daemon for thread in threading.enumerate())

        asyncio.run(run())  # waits for its executor's threads, but not for this one


@pytest.mark.parametrize("openai", [True, False])
def test_every_route_that_generates_has_an_operation(tmp_path: Path, openai: bool) -> None:
    app, _ = make_app(tmp_path, openai=openai)
    paths = {route.path for route in app.router.routes if isinstance(route, GeneratingRoute)}
    assert paths <= OPERATIONS.keys()
    assert paths


@pytest.mark.parametrize(
    ("url", "message"),
    [("grpc://127.0.0.1:4317", "over HTTP"), ("collector:4318", "expected a URL"), ("http://", "expected")],
)
def test_urls_that_lead_nowhere(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ServeOptions(otlp_traces_endpoint=url).http({})
    assert str(caught.value).startswith(f"--otlp-traces-endpoint {url!r}: ")
    for given, used in ((URL[:-10], URL), (URL, URL), (f"{URL}/x", f"{URL}/x")):  # adds the protocol's default path
        assert ServeOptions(otlp_traces_endpoint=given).http({}).traces_endpoint == used


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ConfigError, match=r"is not installed; pip install 'pd-cluster\[otel\]'"):
        check_packages(URL)
    check_packages("")
