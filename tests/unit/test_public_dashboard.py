"""The dashboard at the public port: access, what is shown, and what is hidden."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from msgspec.structs import replace

from pd_cluster.api.admin.admin_app import describe
from pd_cluster.api.admin.overview_routes import MOST_SHARED, SHARED_S, SharedAnswers
from pd_cluster.api.api_extension import ClusterView, PublicPort
from pd_cluster.api.middleware.admin_access import AdminAccess, HostNames
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.commands.serve_scheduler import check_public_dashboard
from pd_cluster.errors import ConfigError
from pd_cluster.extras.dashboard.dashboard_extension import Dashboard
from pd_cluster.extras.dashboard.dashboard_routes import PageView, cookie_of
from pd_cluster.extras.dashboard.dashboard_sessions import MOST_LOOKS
from pd_cluster.extras.dashboard.public_dashboard import MAX_LOGIN_NBYTES
from pd_cluster.extras.key_file.key_table import KeyTable
from pd_cluster.extras.key_file.shared_rate_limits import SharedRateLimits
from pd_cluster.process_messages import Busy, Keys
from pd_cluster.settings.http_settings import HttpConfig, Tls
from pd_cluster.settings.routing_settings import AdmissionSettings, RoutingConfig
from tests.support.elastic_world import ElasticWorld
from tests.support.keyed_port import SALT, key_of
from tests.support.public_port import make_app

HOST = "http://localhost:9000"
ORIGIN = {"Origin": HOST}
KEY = "sk-one-key"
COOKIE = cookie_of(PageView(is_whole=False))
SECRETS = ("10.9.8.7", "/secret/path", "127.0.0.1", "pid", "epoch", "device_ids", "way_out")


class World:
    """A cluster with a dead instance whose reason contains an address, and its app."""

    def __init__(
        self,
        folder: Path,
        http: HttpConfig,
        file_keys: FileKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = ElasticWorld()
        dead = self.cluster.membership.instances[0]
        dead.state, dead.reason = "unreachable", "10.9.8.7:8088 refused /secret/path"
        stats = RequestStats(lambda: 0.0)
        overview = Overview(self.cluster.membership, lambda: (stats.snapshot(), Busy()), RoutingConfig())
        overview.look()
        instances = self.cluster.elastic.instances
        shown = lambda: [describe(i) for i in instances]  # noqa: E731
        access = AdminAccess("t", True, frozenset({"pd.example"}))
        http = replace(http, has_public_dashboard=True)
        dashboard = Dashboard(ClusterView(overview, shown, "a model", http, access, PublicPort("127.0.0.1", 9)), clock)
        self.sessions = dashboard.public_sessions
        self.app = make_app(folder, http, file_keys=file_keys, extensions=[dashboard])[0]

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=HOST)


async def login(client: httpx.AsyncClient, root: str = "", **proof: str) -> httpx.Response:
    return await client.post(f"{root}/dashboard/api/session", json=proof, headers=ORIGIN)


async def test_a_key_or_a_link_shows_figures_and_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path, HttpConfig(api_keys=(KEY,)))
    async with world.client() as client:
        assert (await client.get("/dashboard/")).status_code == 200, "the page has no cluster data"
        state = (await client.get("/dashboard/api/session")).json()
        assert state == {"command_token": None, "is_whole": False, "takes_keys": True}
        for proof in ({"api_key": KEY}, {"code": world.sessions.new_code()}):
            client.cookies.clear()
            assert (await client.get("/dashboard/api/overview")).status_code == 401
            answer = await login(client, **proof)
            assert answer.status_code == 200, answer.text
            attributes = answer.headers["set-cookie"].lower()
            assert all(each in attributes for each in ("httponly", "samesite=strict", "path=/dashboard"))
            found = (await client.get("/dashboard/api/overview")).json()
            assert found["model"] == "a model"
            assert [each["state"] for each in found["instances"]] == ["unreachable", "ready", "ready", "ready"]
            assert "prefill-0 is unreachable" in [each["text"] for each in found["problems"]]
            text = json.dumps(found)
            assert not [secret for secret in SECRETS if secret in text]
        headers = {"Origin": "https://localhost:9000"}  # a page served through a TLS proxy
        answer = await client.post("/dashboard/api/session", json={"api_key": KEY}, headers=headers)
        assert "secure" in answer.headers["set-cookie"].lower()


async def test_there_are_no_commands_logs_requests_or_chats(tmp_path: Path) -> None:
    world = World(tmp_path, HttpConfig(api_keys=(KEY,)))
    async with world.client() as client:
        token = (await login(client, api_key=KEY)).json()["command_token"]
        headers = {**ORIGIN, "X-PD-Dashboard": token}
        data = "/dashboard/api"
        for path in ("/instances", "/requests", "/models", "/instances/prefill-0/logs", "/requests/x/timeline"):
            assert (await client.get(f"{data}{path}", headers=headers)).status_code == 404, path
        for path in ("/instances/prefill-0/drain", "/instances/prefill-0/remove", "/chat"):
            assert (await client.post(f"{data}{path}", json={}, headers=headers)).status_code in (404, 405), path
        for path in ("/dashboard/codes", "/dashboard/public-codes"):
            assert (await client.post(path, headers=headers)).status_code in (404, 405), path
        assert world.cluster.membership.instances[0].service == "in"
        # the cookie grants no access to the API
        cookie = {"Cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
        assert (await client.get("/v1/models", headers=cookie)).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})).status_code == 200
        assert (await client.delete(f"{data}/session", headers=headers)).status_code == 200
        assert (await client.get(f"{data}/overview", headers=cookie)).status_code == 401


async def test_it_answers_under_its_own_names_only(tmp_path: Path) -> None:
    """Covers a page whose name was rebound to this address: it sends its own name as Host and Origin."""
    world = World(tmp_path, HttpConfig(api_keys=(KEY,)))
    asked = [("GET", path) for path in ("/", "/api/session", "/api/overview")] + [("POST", "/api/session")]
    async with world.client() as client:
        assert (await login(client, api_key=KEY)).status_code == 200
        cookie = {"Cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
        for host, is_known in [("localhost:9000", True), ("pd.example", True), ("evil.example:9000", False)]:
            for method, path in asked:
                headers = {**cookie, "Host": host, "Origin": f"http://{host}"}
                answer = await client.request(method, f"/dashboard{path}", json={"api_key": KEY}, headers=headers)
                assert answer.status_code == (200 if is_known else 403), (host, path)
                assert is_known or "is not a name of this port" in answer.text


def test_which_names_are_a_port_s_own() -> None:
    far, near = HostNames(is_local=False), HostNames()
    for names, host, scheme, is_known in (
        *((far, host, "http", True) for host in ("10.0.0.5:9001", "[fd00::5]:9001", socket.gethostname())),
        *((far, host, "http", False) for host in ("evil.example", "")),
        (near, "10.0.0.5:9001", "http", False),
        (near, "ops.example", "https", True),  # the browser checks the name against the certificate
    ):
        about = {"type": "http", "scheme": scheme, "server": ("x", 1), "path": "/", "query_string": b""}
        scope = {**about, "headers": [(b"host", host.encode())]}
        assert names.has(Request(scope)) == is_known
        assert names.has(Request({**scope, "server": None}))  # over a Unix socket


async def test_a_session_looks_no_more_often_than_its_page_needs(tmp_path: Path) -> None:
    now_s = [100.0]
    world = World(tmp_path, HttpConfig(api_keys=(KEY,)), clock=lambda: now_s[0])
    other, _ = world.sessions.begin()
    async with world.client() as client:
        await login(client, api_key=KEY)
        found = [await client.get("/dashboard/api/overview") for _ in range(int(MOST_LOOKS) + 1)]
        assert [each.status_code for each in found] == [200] * int(MOST_LOOKS) + [429]
        assert found[-1].headers["retry-after"] == "1"
        await login(client, api_key=KEY)
        assert (await client.get("/dashboard/api/overview")).status_code == 200, "each session has its own rate limit"
        for _ in range(100):  # a page's requests of a minute
            now_s[0] += 0.5
            assert (await client.get("/dashboard/api/overview")).status_code == 200
        for _ in range(100):  # one key must not end others' sessions
            await login(client, api_key=KEY)
        client.cookies.clear()
        answer = await client.get("/dashboard/api/overview", headers={"Cookie": f"{COOKIE}={other}"})
        assert answer.status_code == 200


def test_pages_that_ask_for_the_same_share_an_answer() -> None:
    now_s, made = [0.0], []

    def new(since_s: float, since_mark: int) -> bytes:
        made.append((since_s, since_mark))
        return f"{len(made)}".encode()

    shared = SharedAnswers(new, lambda: now_s[0])
    assert [shared.get(1.0, 0), shared.get(1.0, 0), shared.get(2.0, 0), shared.get(1.0, 1)] == [b"1", b"1", b"2", b"3"]
    now_s[0] = SHARED_S
    assert shared.get(1.0, 0) == b"4"
    for since in range(2 * MOST_SHARED):
        shared.get(float(since), 9)
    assert len(shared._kept) == MOST_SHARED


async def test_wrong_keys_and_foreign_pages_get_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, HttpConfig(api_keys=(KEY,), allowed_origins=("*",), allow_credentials=True))
    async with world.client() as client:
        for proof in ({"api_key": "x"}, {"api_key": f"{KEY} "}, {"code": KEY}):
            assert (await login(client, **proof)).status_code == 401, proof
        for bad in ({}, {"api_key": "", "code": ""}, {"api_key": KEY, "code": "x"}, {"key": KEY}):
            assert (await login(client, **bad)).status_code == 400, bad
        assert (await login(client, api_key="x" * MAX_LOGIN_NBYTES)).status_code == 400
        for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": "http://["}):
            answer = await client.post("/dashboard/api/session", json={"api_key": KEY}, headers=origin)
            assert answer.status_code == 403
        assert not client.cookies
        await login(client, api_key=KEY)
        answer = await client.get("/dashboard/api/overview", headers={"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers, "no other page may read it, whatever CORS allows"


async def test_a_withdrawn_key_ends_its_session(tmp_path: Path) -> None:
    now_s = [0.0]
    keys = Keys(SALT, (key_of(KEY), key_of("short", expires_s=100.0)), (0, 1), ())
    file_keys = KeyTable(keys, SharedRateLimits.create(), RequestStats().tenants, lambda: now_s[0])
    world = World(tmp_path, HttpConfig(key_file="keys.json"), file_keys)
    async with world.client() as client:
        for key in (KEY, "short"):
            assert (await login(client, api_key=key)).status_code == 200
            assert (await client.get("/dashboard/api/overview")).status_code == 200
        now_s[0] = 100.0
        assert (await client.get("/dashboard/api/overview")).status_code == 401, "the session must have expired"
        assert (await login(client, api_key="short")).status_code == 401
        await login(client, api_key=KEY)
        file_keys.replace(Keys(SALT, (), (), ()))
        assert (await client.get("/dashboard/api/overview")).status_code == 401, "the session of a removed key must end"


@pytest.mark.parametrize("strips", [True, False])
async def test_it_lies_under_the_prefix_of_a_proxy(tmp_path: Path, strips: bool) -> None:
    root = "/llm"
    world = World(tmp_path, HttpConfig(root_path=root))
    asked = "" if strips else root
    async with world.client() as client:
        assert (await client.get(f"{asked}/dashboard")).headers["location"] == f"{root}/dashboard/"
        answer = await login(client, asked, code=world.sessions.new_code())
        assert f"path={root}/dashboard" in answer.headers["set-cookie"].lower()
        assert answer.json()["takes_keys"] is False
        cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
        assert (await client.get(f"{asked}/dashboard/api/overview", headers=cookie)).status_code == 200
        assert (await client.get(f"{asked}/health")).status_code == 503


async def test_without_the_flag_there_is_none(tmp_path: Path) -> None:
    app, _ = make_app(tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
        for path in ("/dashboard", "/dashboard/", "/dashboard/api/session"):
            assert (await client.get(path)).status_code == 404


def test_no_cookie_crosses_a_network_in_plain_text() -> None:
    open_to_all = HttpConfig(has_public_dashboard=True)
    check_public_dashboard(HttpConfig(has_public_dashboard=True, tls=Tls("c.pem")), "0.0.0.0", AdmissionSettings())
    check_public_dashboard(open_to_all, "127.0.0.1", AdmissionSettings())
    check_public_dashboard(open_to_all, "0.0.0.0", AdmissionSettings(uds="/run/a.socket"))
    check_public_dashboard(HttpConfig(), "0.0.0.0", AdmissionSettings(api_workers=2))
    with pytest.raises(ConfigError, match=r"^--public-dashboard: .*--host 0.0.0.0 is reached without TLS"):
        check_public_dashboard(open_to_all, "0.0.0.0", AdmissionSettings())
    with pytest.raises(ConfigError, match=r"^--public-dashboard: .*not with --api-workers 2"):
        check_public_dashboard(open_to_all, "127.0.0.1", AdmissionSettings(api_workers=2))
