"""API keys, CORS and the root path at the public port: which requests are admitted and which are refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from pd_cluster.api.middleware.api_key_auth import ApiKeys
from pd_cluster.api.middleware.cors import Cors
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts
from pd_cluster.service.callers.caller import Caller
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.public_port import Answer, ask, ask_each, make_app

KEYS = ("sk-first", "sk-second_2")
RIGHT = ("Authorization", f"Bearer {KEYS[1]}")
ORIGIN = ("Origin", "https://page.example")
PREFLIGHT = [ORIGIN, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")]

Ask = Callable[..., Answer]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Ask]:
    """Returns `make(**settings)`, which returns `ask(method, path, headers, body)` for a server with these settings."""

    def build(openai: bool = True, **settings: Any) -> Ask:
        app, _ = make_app(tmp_path, HttpConfig(**{"api_keys": KEYS, **settings}), openai)
        return lambda *question: ask(app, *question)

    return build


# ---- keys


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer sk-firs")],
        [("Authorization", "Bearer SK-FIRST")],
        [("Authorization", "Basic sk-first")],
        [("X-Api-Key", "sk-first")],
        [("Authorization", "Bearer caf\xe9")],
        [("Authorization", "Bearer wrong"), RIGHT],  # a proxy may have checked the other header
        [RIGHT, RIGHT],
    ],
)
def test_without_a_right_key_nothing_is_read_or_served(
    make: Callable[..., Ask], headers: list[tuple[str, str]]
) -> None:
    answer = make()("POST", "/v1/chat/completions", headers, {"messages": []})
    assert answer.status == 401
    assert answer.num_received == 0, "the body was read before the key was checked"
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "sk-" not in error["message"]
    assert ("wrong" in error["message"]) == any(name == "Authorization" for name, _ in headers)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_routes_take_a_key_in_anthropics_header(make: Callable[..., Ask], path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": "nothing"}
    found = [
        (answer.status, answer.num_received, answer.json()["error"]["type"])
        for headers in (
            [("X-Api-Key", KEYS[0])],
            [RIGHT],
            [("X-Api-Key", "wrong")],
            [("X-Api-Key", KEYS[0]), ("X-Api-Key", KEYS[0])],
            [("X-Api-Key", KEYS[0]), ("Authorization", "Bearer wrong")],
        )
        for answer in [make()("POST", path, headers, body)]
    ]
    assert found == [(404, 1, "not_found_error")] * 2 + [(401, 0, "authentication_error")] * 3
    assert make(metrics_key=KEYS[0])("GET", "/metrics", [("X-Api-Key", KEYS[0])]).status == 401


def test_each_key_opens(make: Callable[..., Ask]) -> None:
    for value in (f"Bearer {KEYS[0]}", f"Bearer {KEYS[1]}", f"bearer  {KEYS[0]} "):
        answer = make()("GET", "/v1/models", [("Authorization", value)])
        assert (answer.status, answer.json()["data"][0]["id"]) == (200, "tiny")
    assert make()("GET", f"/v1/models?api_key={KEYS[0]}&authorization=Bearer%20{KEYS[0]}").status == 401


@pytest.mark.parametrize("openai", [True, False])
def test_every_route_but_the_probes_is_closed(tmp_path: Path, openai: bool) -> None:
    app, _ = make_app(tmp_path, HttpConfig(api_keys=KEYS), openai)
    document = app.openapi()
    paths = {*document["paths"], "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/", "/nothing"}
    paths |= {"/static-offline-docs/swagger-ui-bundle.js", "/v1/models/tiny", "/admin", "/instances"}
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        for path, answer in ask_each(app, method, paths):
            is_open = path in ("/health", "/ping", "/live") and method in ("GET", "HEAD")
            assert (answer.status != 401) == is_open, (method, path)


@pytest.mark.parametrize("root_path", ["", "/api", "/health"])
def test_no_way_of_writing_a_path_leads_around_the_keys(tmp_path: Path, root_path: str) -> None:
    """Without a key, no spelling of a path reaches anything except the probes."""
    app, _ = make_app(tmp_path, HttpConfig(api_keys=KEYS, root_path=root_path))
    pieces = [
        "",
        "/",
        "//",
        "/health",
        "/ping",
        "/v1/models",
        "/api",
        "/..",
        "\n",
        ";",
        "%2f",
        "/HEALTH",
        "\0",
        "?",
        "#",
    ]
    num_open = 0
    paths = {"".join(parts) for parts in itertools.product(pieces, repeat=3)}
    for path, answer in ask_each(app, "GET", paths):
        if answer.status != 401:
            num_open += 1
            if answer.status != 404:
                assert b'"status":"unavailable"' in answer.body or b'"status":"alive"' in answer.body, path
    assert num_open >= 3


def test_probes_are_open_under_the_root_path_too(make: Callable[..., Ask]) -> None:
    asked = make(root_path="/api")
    assert asked("GET", "/api/health").status == asked("GET", "/health").status == 503  # there is no instance
    assert make(root_path="/heal")("GET", "/health").status == 503  # a prefix of the path, but not of whole segments
    for path in ("/apihealth", "/api//health", "/api/api/health", "/api/health/", "/api/v1/models"):
        assert asked("GET", path).status == 401, path


@pytest.mark.parametrize("path", ["/metrics", "/api/metrics"])
def test_metrics_open_with_their_key_and_nothing_else_does(make: Callable[..., Ask], path: str) -> None:
    metrics_key = ("Authorization", "Bearer mk-1")
    asked = make(metrics_key="mk-1", root_path="/api")
    assert asked("GET", path, [metrics_key]).status == 200
    for headers in ([], [RIGHT], [("Authorization", "Bearer mk-2")], [metrics_key, metrics_key]):
        assert asked("GET", path, headers).status == 401
    for other in ("/v1/models", "/docs", "/load/", "/loads"):
        assert asked("GET", other, [metrics_key]).status == 401
    load = path.replace("metrics", "load")  # a gateway's endpoint picker uses this key
    assert [asked("GET", load, [key]).status for key in (metrics_key, RIGHT)] == [200, 200]
    assert [asked("GET", load, keys).status for keys in ([], [("Authorization", "Bearer mk-2")])] == [401, 401]
    closed = make(root_path="/api")("GET", path, [RIGHT])
    assert closed.status == 401
    assert "--metrics-key" in closed.json()["error"]["message"]


def test_a_metrics_key_alone_closes_the_metrics_alone(make: Callable[..., Ask], tmp_path: Path) -> None:
    asked = make(api_keys=(), metrics_key="mk-1")
    assert asked("GET", "/v1/models").status == 200
    assert asked("GET", "/metrics").status == 401
    app, _ = make_app(tmp_path, HttpConfig(metrics_key="mk-1", root_path="/api"))
    pieces = ["", "//", "/metrics", "/api", "/..", "\n", ";", "%2f", "/METRICS"]
    for path, answer in ask_each(app, "GET", {"".join(parts) for parts in itertools.product(pieces, repeat=3)}):
        assert b"vllm:" not in answer.body, path


def test_a_server_that_stops_still_asks_for_the_key_first(tmp_path: Path) -> None:
    app, drain = make_app(tmp_path, HttpConfig(api_keys=KEYS, root_path="/api"))
    drain.begin()
    assert ask(app, "POST", "/v1/completions").status == 401
    assert ask(app, "POST", "/v1/completions", [RIGHT]).status == 503
    health = ask(app, "GET", "/api/ping")
    assert (health.status, health.json()["status"]) == (503, "draining")


# ---- tenants


def caller_for(key: str, **settings: Any) -> Caller:
    """Returns the caller that routes see for a key."""
    seen: list[Caller] = []

    async def route(scope: Any, receive: Any, send: Any) -> None:
        seen.append(caller_of(Request(scope)))

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": ("203.0.113.1", 1)}
    asyncio.run(ApiKeys(route, HttpConfig(api_keys=KEYS, **settings), TenantCounts())(scope, None, None))  # type: ignore[arg-type]
    return seen[0]


def test_each_tenant_has_cached_prompts_of_its_own() -> None:
    """Tenants share no cached prompts; a rotated key keeps its tenant, and so finds its predecessor's."""
    first, second = (caller_for(key) for key in KEYS)
    salts = [caller.salt(own) for caller in (first, second) for own in (None, "a", "b")]
    assert len({*salts}) == 6
    assert not any(key in f"{caller} {salts}" for key in KEYS for caller in (first, second)), "the salt reveals the key"
    assert first == caller_for(KEYS[0]), "the salt changes with a restart"
    old, new = (caller_for(key, tenants=("team", "team")) for key in KEYS)
    assert old == new
    assert old.salt("mine") == new.salt("mine") != caller_for(KEYS[0], tenants=("team", "other")).salt(None)
    assert caller_for(KEYS[0], tenants=("other", "team")) != caller_for(KEYS[1], tenants=("other", "team"))
    first, second = (caller_for(key, shares_prefix_cache=True) for key in KEYS)
    assert (first.salt(None), second.salt("mine")) == ("", "mine")
    assert first.client != second.client
    scope = {"type": "http", "headers": [], "client": ("203.0.113.1", 1)}
    caller = caller_of(Request(scope))
    assert (caller.client, caller.salt(None), caller.salt("mine")) == ("203.0.113.1", "", "mine")
    assert caller_of(Request({**scope, "client": None})).salt(None) == ""


# ---- CORS


def test_pages_of_allowed_origins_may_ask_and_read_refusals(make: Callable[..., Ask]) -> None:
    answer = make()("OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization"
    answer = make()("POST", "/v1/chat/completions", [ORIGIN])
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "*")
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    alone = make()("GET", "/v1/models", [RIGHT]).headers
    assert not [name for name in alone if name.startswith("access-control") or name == "vary"]
    closed = make(allowed_origins=())
    assert closed("OPTIONS", "/v1/models", PREFLIGHT).status == 401
    assert "access-control-allow-origin" not in closed("GET", "/v1/models", [ORIGIN, RIGHT]).headers
    asked = make(allowed_origins=("https://page.example",), allowed_methods=("GET",), allow_credentials=True)
    answer = asked("GET", "/v1/models", [ORIGIN, RIGHT])
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "Origin" in answer.headers["vary"]
    other = asked("GET", "/v1/models", [("Origin", "https://page.example.evil"), RIGHT])
    assert other.status == 200
    assert "access-control-allow-origin" not in other.headers
    assert asked("OPTIONS", "/v1/models", PREFLIGHT).status == 400  # this route does not allow POST


def test_streams_go_through_piece_by_piece() -> None:
    """Middleware forwards each piece of a stream before the next one is generated."""
    sent: list[bytes] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for at in range(3):
            await send({"type": "http.response.body", "body": b"%d" % at, "more_body": True})
            assert sent == [b"%d" % each for each in range(at + 1)]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(message["body"])

    headers = [(b"origin", b"https://page.example"), (b"authorization", b"Bearer sk-first")]
    app = Cors(ApiKeys(stream, HttpConfig(api_keys=KEYS), TenantCounts()), allow_origins=["*"])
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    assert sent == [b"0", b"1", b"2"]


# ---- root path


def test_routes_and_docs_work_with_and_without_the_root_path(make: Callable[..., Ask]) -> None:
    asked = make(api_keys=(), root_path="/api/llm")
    for path in ("/v1/models", "/tokenize", "/openapi.json", "/static-offline-docs/swagger-ui.css"):
        method, body = ("POST", {"prompt": "a"}) if path == "/tokenize" else ("GET", b"")
        assert asked(method, path, [], body).status == 200, path
        assert asked(method, f"/api/llm{path}", [], body).status == 200, path
    assert asked("GET", "/api/v1/models").status == 404
    page = make(api_keys=(), root_path="/api")("GET", "/docs").body.decode()
    assert "'/api/openapi.json'" in page
    assert '"/api/static-offline-docs/swagger-ui-bundle.js"' in page
    document = make(api_keys=(), root_path="/api")("GET", "/openapi.json").json()
    assert document["servers"] == [{"url": "/api"}]
