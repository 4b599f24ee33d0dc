"""Sends hostile bodies and queries to every route of every port, from the apps' lists, during a repeated stream.

A route that is missing in the table below fails the first test, because hostile bodies are derived from a valid one.
No answer may be a 5xx fault or late, and refusals must be well-formed errors on one line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import pytest
from fastapi import FastAPI

from pd_cluster.api.admin.admin_app import AdminAccess, ShownCluster, admin_app
from pd_cluster.api.admin.control_routes import control_routes
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.api.api_extension import ClusterView, PublicPort
from pd_cluster.cluster.members.adapter_registry import AdapterBook
from pd_cluster.cluster.members.cluster_control import ClusterControl
from pd_cluster.cluster.members.cluster_credentials import ADMIN_TOKEN_FILE
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.extras.dashboard.dashboard_extension import Dashboard
from pd_cluster.process_messages import Busy
from pd_cluster.settings.file_settings import KeptFiles
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.response_settings import KeptResponses
from pd_cluster.settings.routing_settings import RoutingConfig
from tests.api.conftest import FLAGS
from tests.support.api_cases import nothing_left
from tests.support.canary import Canary
from tests.support.cluster import LiveCluster
from tests.support.elastic_world import ElasticWorld
from tests.support.public_port import make_app

Port = Literal["public", "plain", "admin"]
DEADLINE_S = 20.0
UNREAD_NBYTES = 1 << 20
NOBODY = "nobody"  # a name or id that does not exist
BAD_QUERY = "mode=%00&level=1e999&tags=%ff&wait_for_inflight_requests=maybe&limit=-1&include=%22&x=" + "x" * 3000
SAID = [{"role": "user", "content": "a"}]
TEXTS = {"input": ["a", "b"], "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 10**30, 1e308, "", "x", "\0", "../../etc/passwd", "1e999", [], {}, [[[]]], [None], [{}], [-1]),
    *({"a": {"b": []}}, {"": None}, ["x" * 100_000], [0.5] * 1000, {"type": "x"}, [{"role": []}], [{"type": "text"}]),
)


@dataclass(frozen=True)
class Good:
    """A valid body for a route. `keeps`: names of hostile bodies that would be valid commands, and are skipped."""

    body: dict[str, Any] = field(default_factory=dict)
    query: str = ""
    keeps: frozenset[str] = frozenset()


def _completion(**fields: Any) -> Good:
    return Good({"prompt": "a", "max_tokens": 2, **fields})


def _chat(**fields: Any) -> Good:
    return Good({"messages": SAID, "max_tokens": 2, **fields})


def _rerank() -> Good:
    return Good({"query": TEXTS["query"], "documents": TEXTS["documents"]})


DERENDER = {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "length"}]}
NONE = Good()
COMMAND = Good(query=BAD_QUERY)  # acts on the whole cluster and reads no body, so only wrong queries are sent
SESSION = Good({"code": "x"})
DATA, TEXT = "/dashboard/api", "/v1/completions"
CHANGES: dict[tuple[Port, str, str], Good] = {
    ("public", "POST", "/ping"): NONE,
    ("public", "POST", "/v1/completions"): _completion(stop=["b"], logit_bias={"5": 1}, stream_options=None),
    ("public", "POST", "/v1/chat/completions"): _chat(tools=[], response_format={"type": "text"}),
    ("public", "POST", "/v1/chat/completions/batch"): Good({"messages": [SAID], "max_tokens": 2}),
    ("public", "POST", "/v1/chat/completions/render"): _chat(),
    ("public", "POST", "/v1/completions/render"): _completion(),
    ("public", "POST", "/v1/messages/render"): _chat(system="b", tools=[]),
    ("public", "POST", "/v1/responses/render"): Good({"input": "a", "max_output_tokens": 16, "tools": []}),
    ("public", "POST", "/v1/chat/completions/derender"): Good(
        {"generate_response": DERENDER, "chat_request": _chat().body, "prompt_tokens": 5}
    ),
    ("public", "POST", "/v1/completions/derender"): Good(
        {"generate_responses": [DERENDER], "completion_request": _completion().body}
    ),
    ("public", "POST", "/v1/responses"): Good({"input": "a", "max_output_tokens": 16, "tools": [], "store": False}),
    ("public", "POST", "/v1/responses/input_tokens"): Good({"input": "a", "tools": [], "store": False}),
    ("public", "POST", "/v1/responses/compact"): NONE,
    ("public", "DELETE", "/v1/responses/{response_id}"): NONE,
    ("public", "POST", "/v1/responses/{response_id}/cancel"): NONE,
    ("public", "POST", "/v1/files"): NONE,
    ("public", "DELETE", "/v1/files/{file_id}"): NONE,
    ("public", "POST", "/v1/batches"): Good({"input_file_id": NOBODY, "endpoint": TEXT, "completion_window": "24h"}),
    ("public", "POST", "/v1/batches/{batch_id}/cancel"): NONE,
    ("public", "POST", "/v1/messages"): _chat(system="b", tools=[]),
    ("public", "POST", "/v1/messages/count_tokens"): Good({"messages": SAID, "system": "b"}),
    ("public", "POST", "/inference/v1/generate"): Good({"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
    ("public", "POST", "/invocations"): _completion(),
    ("public", "POST", "/v1/embeddings"): Good({"input": TEXTS["input"], "dimensions": 8}),
    ("public", "POST", "/pooling"): Good({"input": TEXTS["input"], "task": "embed"}),
    ("public", "POST", "/classify"): Good({"input": TEXTS["input"]}),
    ("public", "POST", "/v2/embed"): Good({"texts": ["a"], "embedding_types": ["float"]}),
    ("public", "POST", "/generative_scoring"): Good({"query": "a", "items": ["b"], "label_token_ids": [5]}),
    ("public", "POST", "/v1/score"): Good({"text_1": TEXTS["text_1"], "text_2": TEXTS["text_2"]}),
    ("public", "POST", "/score"): Good({"text_1": TEXTS["text_1"], "text_2": TEXTS["text_2"]}),
    ("public", "POST", "/v1/rerank"): _rerank(),
    ("public", "POST", "/v2/rerank"): _rerank(),
    ("public", "POST", "/rerank"): _rerank(),
    ("public", "POST", "/tokenize"): Good({"prompt": "a", "return_token_strs": True}),
    ("public", "POST", "/detokenize"): Good({"tokens": [5]}),
    ("public", "POST", f"{DATA}/session"): SESSION,
    ("public", "DELETE", f"{DATA}/session"): NONE,
    ("plain", "POST", "/generate"): _completion(),
    ("plain", "POST", "/ping"): NONE,
    ("admin", "POST", "/instances"): Good({"name": NOBODY, "port": 1}),
    ("admin", "POST", "/instances/{name}/drain"): Good({"force": False, "timeout_s": 1}),
    ("admin", "POST", "/instances/{name}/undrain"): NONE,
    ("admin", "POST", "/instances/{name}/remove"): Good({"force": False, "timeout_s": 1}),
    ("admin", "POST", "/instances/{name}/role"): Good({"role": "decode", "force": False}),
    ("admin", "POST", "/v1/load_lora_adapter"): Good({"lora_name": NOBODY, "lora_path": NOBODY, "load_inplace": False}),
    ("admin", "POST", "/v1/unload_lora_adapter"): Good({"lora_name": NOBODY}),
    ("admin", "POST", "/adapters"): Good({"name": NOBODY, "src": NOBODY}),
    ("admin", "DELETE", "/adapters/{name:path}"): NONE,
    ("admin", "POST", "/inference/v1/abort_requests"): Good({"request_ids": [NOBODY]}),
    ("admin", "POST", "/reset_prefix_cache"): Good(),
    ("admin", "POST", "/abort_requests"): Good(
        {"request_ids": [NOBODY]}, keeps=frozenset({"empty", "request_ids = None", "again request_ids"})
    ),
    ("admin", "POST", "/pause"): COMMAND,
    ("admin", "POST", "/resume"): NONE,
    ("admin", "POST", "/sleep"): COMMAND,
    ("admin", "POST", "/wake_up"): COMMAND,
    ("admin", "POST", "/dashboard/codes"): NONE,
    ("admin", "POST", "/dashboard/public-codes"): NONE,
    ("admin", "POST", f"{DATA}/session"): SESSION,
    ("admin", "DELETE", f"{DATA}/session"): NONE,
    ("admin", "POST", f"{DATA}/chat"): _chat(),
}
for _name in ("", *(f"/{{name}}/{command}" for command in ("drain", "undrain", "remove", "role"))):
    CHANGES["admin", "POST", f"{DATA}/instances{_name}"] = CHANGES["admin", "POST", f"/instances{_name}"]


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yields each route's method and path, including those of included routers."""
    for route in app.router.routes:
        within = route.effective_route_contexts() if hasattr(route, "effective_route_contexts") else [route]
        for each in within:
            for method in getattr(each, "methods", None) or ():  # mounts (files) have no methods
                yield method, each.path


def all_routes(folder: Path) -> set[tuple[Port, str, str]]:
    """Returns the routes of all ports, with every option that adds routes."""
    world = ElasticWorld()
    stats = RequestStats(lambda: 0.0)
    overview = Overview(world.membership, lambda: (stats.snapshot(), Busy()), RoutingConfig())
    responses, files = KeptResponses(folder=str(folder / "kept")), KeptFiles(folder=str(folder / "files"))
    http = HttpConfig(responses=responses, files=files, has_public_dashboard=True)
    control = control_routes(ClusterControl(world.membership, world.mailbox, world.router, 0.2), {})
    access = AdminAccess("t", True)
    dashboard = Dashboard(ClusterView(overview, list, "a model", http, access, PublicPort("127.0.0.1", 9)))
    (pages,) = (layer.kwargs["pages"] for layer in dashboard.public_layers(None))
    shown = ShownCluster(overview, "a model", folder, [dashboard])
    book = cast(AdapterBook, object())
    timelines = LocalTimelines(world.router.timelines)
    apps: list[tuple[Port, FastAPI]] = [
        ("public", make_app(folder, http, extensions=[dashboard], shows_tokenizer=True)[0]),
        ("public", pages),
        ("plain", make_app(folder, HttpConfig(), openai=False)[0]),
        ("admin", admin_app(world.elastic, timelines, access, book, control, shown)),
    ]
    return {(port, method, path) for port, app in apps for method, path in routes_of(app)}


def test_every_route_that_takes_something_is_here(tmp_path: Path) -> None:
    found = all_routes(tmp_path)
    assert {each for each in found if each[1] not in ("GET", "HEAD")} == set(CHANGES)
    assert {("public", "GET", "/v1/models"), ("admin", "GET", "/overview"), ("plain", "GET", "/health")} <= found


# ---- the bodies


def nested(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + ("0" if opening != "[" else "") + closing * depth).encode()


def with_more(good: bytes, more: bytes) -> bytes:
    return good[:-1] + (b"" if good == b"{}" else b", ") + more + b"}"


def hostile_bodies(good: Good) -> Iterator[tuple[str, bytes]]:
    text = json.dumps(good.body).encode()
    yield from {
        "empty": b"",
        "an array": b"[]",
        "a string": b'"a"',
        "a number": b"1e400",
        "null": b"null",
        "no text": b"\xff\xfe\x00",
        "zeros": b"\0" * 1000,
        "truncated": text[:-1],
        "more behind": text + b"}",
        "NaN": with_more(text, b'"x": NaN'),
        "a surrogate": with_more(text, b'"x": "\\ud800"'),
        "bad UTF-8": with_more(text, b'"x": "\xc3\x28"'),
        "a long number": with_more(text, b'"x": ' + b"9" * 100_000),
        "deep arrays": with_more(text, b'"x": ' + nested(100_000, "[", "]")),
        "deep objects": with_more(text, b'"x": ' + nested(100_000, '{"a":', "}")),
        "a long string": with_more(text, b'"x": "' + b"x" * (10 << 20) + b'"'),
        "a long name": with_more(text, b'"' + b"x" * (10 << 20) + b'": 1'),
        "many names": with_more(text, b", ".join(b'"%d": 0' % at for at in range(200_000))),
        "too long": b'{"x": "' + b"x" * (33 << 20) + b'"}',
    }.items()
    for name in good.body:
        for value in WRONG:
            shown = repr(value)
            yield f"{name} = {shown[:30]}", json.dumps({**good.body, name: value}).encode()
        yield f"{name} long", json.dumps({**good.body, name: "x" * (10 << 20)}).encode()
        yield f"{name} deep", with_more(text, f'"{name}": '.encode() + nested(60, "[", "]"))
        yield f"again {name}", with_more(text, f'"{name}": null, "{name}": {json.dumps(good.body[name])}'.encode())


# ---- sending


class Asker:
    """Clients for all ports; the admin port's has the token and a dashboard session."""

    def __init__(self, urls: dict[Port, str], token: str) -> None:
        self._clients = {port: httpx.Client(base_url=url, timeout=60, trust_env=False) for port, url in urls.items()}
        self._headers: dict[str, str] = {}
        if (admin := self._clients.get("admin")) is not None:
            admin.headers["Authorization"] = f"Bearer {token}"
            self.begin_session()

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def begin_session(self) -> None:
        admin = self._clients["admin"]
        self._headers = {"Origin": str(admin.base_url).rstrip("/")}
        code = admin.post("/dashboard/codes").raise_for_status().json()["code"]
        begun = admin.post(f"{DATA}/session", json={"code": code}, headers=self._headers).raise_for_status()
        self._headers["X-PD-Dashboard"] = begun.json()["command_token"]

    def ask(self, route: tuple[Port, str, str], query: str, content: bytes) -> httpx.Response:
        port, method, path = route
        headers = self._headers if path.startswith(DATA) and port == "admin" else {}
        for name in ("{name}", "{name:path}", "{response_id}", "{request_id}", "{file_id}", "{batch_id}"):
            path = path.replace(name, NOBODY)
        target = f"{path}?{query}" if query else path
        return self._clients[port].request(method, target, content=content, headers=headers)

    def judge(self, route: tuple[Port, str, str], what: str, query: str, content: bytes) -> str:
        """Sends a request; returns what is wrong with the answer, or ""."""
        began_s = time.monotonic()
        try:
            answer = self.ask(route, query, content)
        except httpx.NetworkError as error:  # disconnected while sending a body that is not read
            return "" if len(content) >= UNREAD_NBYTES else f"{route} {what}: {error!r}"
        took_s = time.monotonic() - began_s
        told = f"{route} {what}: {answer.status_code} after {took_s:.1f} s: {answer.text[:300]}"
        if (answer.status_code >= 500 and answer.status_code != 503) or took_s > DEADLINE_S:
            return told
        has_shape = route[1] != "HEAD" and not (route[2].startswith("/dashboard/{"))  # files have no such errors
        if answer.status_code < 400 or not has_shape:
            return ""
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"no error's shape: {told}"
        return "" if 0 < len(message) < 600 and "\n" not in message else f"a bad message: {told}"


def faults_of(asker: Asker, ports: set[Port], routes: set[tuple[Port, str, str]]) -> list[str]:
    found = []
    for route in sorted(routes):
        if route[0] not in ports:
            continue
        good = CHANGES.get(route, NONE)
        bodies = dict(hostile_bodies(good)) if route[1] != "GET" else {"empty": b"", "no text": b"\xff"}
        for what, content in bodies.items():
            if what not in good.keeps:
                found.append(asker.judge(route, what, good.query, content))
        if route[2].startswith(DATA) and route[1] == "DELETE" and route[0] == "admin":
            asker.begin_session()
        found.append(asker.judge(route, "a bad query", BAD_QUERY, json.dumps(good.body).encode()))
        if route[2].startswith(DATA) and route[1] == "DELETE" and route[0] == "admin":
            asker.begin_session()
    return [each for each in found if each]


@pytest.fixture(scope="module")
def open_wide(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster with every option that adds routes."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "adapters").mkdir()
    flags = [
        *FLAGS,
        *(f"--response-store={folder / 'kept'}", f"--files-dir={folder / 'files'}"),
        *("--enable-lora", "--allow-runtime-lora", f"--lora-root={folder / 'adapters'}"),
        *("--enable-tokenizer-info-endpoint", "--public-dashboard", "--host=127.0.0.1"),
    ]
    with LiveCluster(folder, checkpoint("llama"), arguments=flags) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hostile_bodies_everywhere(open_wide: LiveCluster, tmp_path: Path) -> None:
    cluster, routes = open_wide, all_routes(tmp_path)
    token = (cluster.folder / ADMIN_TOKEN_FILE).read_text().strip()
    with nothing_left(cluster), Asker({"public": cluster.url, "admin": cluster.admin_url}, token) as asker:
        for route, good in CHANGES.items():  # all routes exist and accept their valid bodies
            if route[0] != "plain":
                answer = asker.ask(route, good.query, json.dumps(good.body).encode())
                assert '"unknown_url"' not in answer.text, (route, answer.text)
                assert answer.status_code not in (405, 500), (route, answer.text)
        asker.begin_session()
        with Canary(cluster).singing():
            faults = faults_of(asker, {"public", "admin"}, routes)
        assert not faults, "\n".join([f"{len(faults)} faults", *faults[:20]])


@pytest.mark.slow
def test_hostile_bodies_at_the_plain_port(plain: LiveCluster, tmp_path: Path) -> None:
    with Asker({"plain": plain.url}, "") as asker:
        good = ("plain", "POST", "/generate"), "", b'{"prompt": "a", "max_tokens": 20, "temperature": 0}'
        before = asker.ask(*good).raise_for_status().json()
        faults = faults_of(asker, {"plain"}, all_routes(tmp_path))
        assert asker.ask(*good).json() == before
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:20]])
