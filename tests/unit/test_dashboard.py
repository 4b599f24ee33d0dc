"""The dashboard's sessions, access checks and files, over the real admin app."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.api.admin.admin_app import ShownCluster, admin_app
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.api.api_extension import ClusterView, PublicPort
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.extras.dashboard.dashboard_extension import Dashboard
from pd_cluster.extras.dashboard.dashboard_routes import COOKIE
from pd_cluster.extras.dashboard.dashboard_sessions import (
    CODE_LIFE_S,
    MAX_CODES,
    MAX_SESSIONS,
    SESSION_LIFE_S,
    Sessions,
)
from pd_cluster.extras.dashboard.page_files import STATIC, page_files
from pd_cluster.process_messages import Busy
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.log_files import LogFile
from pd_cluster.settings.routing_settings import RoutingConfig
from tests.support.elastic_world import ElasticWorld

TOKEN, HOST = "t" * 32, "http://localhost:9001"
ORIGIN = {"Origin": HOST}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
READ = ("/instances", "/requests", "/overview", "/instances/prefill-0/logs")


def test_codes_work_once_and_sessions_are_bounded() -> None:
    now_s = [0.0]
    sessions = Sessions(lambda: now_s[0])
    code = sessions.new_code()
    found = sessions.exchange(code)
    assert found is not None
    cookie, session = found
    assert sessions.exchange(code) is None
    assert sessions.find(cookie) is session
    assert sessions.find(cookie + "x") is None
    assert sessions.find("") is None
    late = sessions.new_code()
    now_s[0] += CODE_LIFE_S
    assert sessions.exchange(late) is None
    now_s[0] += SESSION_LIFE_S
    assert sessions.find(cookie) is None
    sessions = Sessions(lambda: 0.0)
    codes = [sessions.new_code() for _ in range(MAX_CODES + 1)]
    assert sessions.exchange(codes[0]) is None
    assert sessions.exchange(codes[1]) is not None
    cookies = []
    for _ in range(MAX_SESSIONS + 1):
        found = sessions.exchange(sessions.new_code())
        assert found is not None
        cookies.append(found[0])
    assert sessions.find(cookies[0]) is None
    assert sessions.find(cookies[-1]) is not None
    assert cookies[-1] not in repr(vars(sessions))


def client_of(logs: Path) -> httpx.AsyncClient:
    world = ElasticWorld()
    stats = RequestStats(lambda: 0.0)
    overview = Overview(world.membership, lambda: (stats.snapshot(), Busy()), RoutingConfig())
    access = AdminAccess(TOKEN, True)
    view = ClusterView(overview, list, "a model", HttpConfig(), access, PublicPort("127.0.0.1", 9))
    shown = ShownCluster(overview, "a model", logs, [Dashboard(view)])
    app = admin_app(world.elastic, LocalTimelines(world.router.timelines), access, shown=shown)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST)


async def begin(client: httpx.AsyncClient) -> dict[str, str]:
    """Starts a session; returns the headers for its commands."""
    made = (await client.post("/dashboard/codes", headers=BEARER)).json()
    assert made["path"] == f"/dashboard/#code={made['code']}"
    answer = await client.post("/dashboard/api/session", json={"code": made["code"]}, headers=ORIGIN)
    assert answer.status_code == 200
    attributes = answer.headers["set-cookie"].lower()
    assert all(each in attributes for each in ("httponly", "samesite=strict", "path=/dashboard"))
    return {**ORIGIN, "X-PD-Dashboard": answer.json()["command_token"]}


async def test_nothing_is_read_without_a_session(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        for path in READ:
            answer = await client.get(f"/dashboard/api{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "no_session")
        assert (await client.get("/dashboard/api/session")).json()["command_token"] is None
        assert (await client.post("/dashboard/codes")).status_code == 401, "a code requires the token"
        for code in ("", "x", "a" * 500):
            answer = await client.post("/dashboard/api/session", json={"code": code}, headers=ORIGIN)
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers


async def test_the_dashboard_answers_under_the_port_s_names_only(tmp_path: Path) -> None:
    """Under another name, even a session's cookie is refused, because any page's name may resolve to this address."""
    async with client_of(tmp_path) as client:
        headers = await begin(client)
        cookie = client.cookies[COOKIE]
        for host, status in (("evil.example:9001", 403), ("127.0.0.1:9001", 200)):
            asked = {**headers, "Host": host, "Origin": f"http://{host}", "Cookie": f"{COOKIE}={cookie}"}
            for path in (*READ[:3], "/session"):
                assert (await client.get(f"/dashboard/api{path}", headers=asked)).status_code == status, (host, path)
            undrained = await client.post("/dashboard/api/instances/prefill-0/undrain", json={}, headers=asked)
            assert undrained.status_code == status
            code = (await client.post("/dashboard/codes", headers=BEARER)).json()["code"]
            begun = await client.post("/dashboard/api/session", json={"code": code}, headers=asked)
            assert begun.status_code == status


async def test_a_session_reads_and_its_cookie_opens_nothing_else(tmp_path: Path) -> None:
    LogFile(tmp_path, "prefill-0").write("one line with Bearer abcdefgh")
    async with client_of(tmp_path) as client:
        headers = await begin(client)
        for path in READ:
            assert (await client.get(f"/dashboard/api{path}")).status_code == 200, path
        overview = (await client.get("/dashboard/api/overview")).json()
        assert overview["model"] == "a model"
        assert [each["instance_id"] for each in overview["instances"]]
        logs = (await client.get("/dashboard/api/instances/prefill-0/logs")).json()
        assert logs["lines"] == ["one line with Bearer [hidden]"]
        # the cookie is ignored outside /dashboard
        cookie = {"Cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
        drained = await client.post("/instances/prefill-0/drain", json={}, headers={**headers, **cookie})
        assert drained.status_code == 401
        assert (await client.get("/instances/prefill-0/logs", headers=cookie)).status_code == 401
        assert (await client.get("/instances/prefill-0/logs", headers=BEARER)).status_code == 200
        assert (await client.delete("/dashboard/api/session", headers=headers)).status_code == 200
        client.cookies.clear()
        old = {"Cookie": cookie["Cookie"]}
        assert (await client.get("/dashboard/api/instances", headers=old)).status_code == 401


async def test_commands_need_this_page_and_its_token(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        headers = await begin(client)
        path = "/dashboard/api/instances/prefill-0/drain"
        bad: list[dict[str, Any]] = [
            {},
            ORIGIN,
            {**headers, "X-PD-Dashboard": "x"},
            {**headers, "Origin": "http://evil.example"},
            {**headers, "Origin": "http://localhost:9002"},
            {**headers, "Origin": "null"},
            {"X-PD-Dashboard": headers["X-PD-Dashboard"]},
        ]
        for each in bad:
            answer = await client.post(path, json={}, headers=each)
            assert answer.status_code == 403, each
            for other in ("/chat", "/instances/prefill-0/remove"):
                assert (await client.post(f"/dashboard/api{other}", json={}, headers=each)).status_code == 403
        made = (await client.post("/dashboard/codes", headers=BEARER)).json()
        for origin in ({}, {"Origin": "http://evil.example"}):
            answer = await client.post("/dashboard/api/session", json={"code": made["code"]}, headers=origin)
            assert answer.status_code == 403
        answer = await client.post(path, json={"force": True}, headers=headers)
        assert answer.status_code == 200, answer.text
        answer = await client.post("/dashboard/api/chat", json={}, headers=headers)
        assert (answer.status_code, "public port does not answer" in answer.text) == (503, True)


async def test_files_are_closed_compressed_and_kept(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        page = (await client.get("/dashboard/")).text
        named = re.findall(r'(?:src|href)="([^"#]+)"', page)
        assert sorted(name.rpartition(".")[2] for name in named) == ["css", "js", "svg"], "expected one of each kind"
        for path in ("/dashboard/", *(f"/dashboard/{name}" for name in named)):
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-frame-options"] == "DENY"
        assert (await client.get("/dashboard")).headers["location"] == "/dashboard/"
        for path in ("app.js", "..%2froutes.py", "%2e%2e/routes.py", "vendor"):
            assert (await client.get(f"/dashboard/{path}")).status_code == 404, path
    async with client_of(tmp_path) as client:
        for name, file in page_files().items():
            for coding in ("gzip, br", "identity"):
                answer = await client.get(f"/dashboard/{name}", headers={"Accept-Encoding": coding})
                assert answer.content == file.content, name
                assert answer.headers["vary"] == "Accept-Encoding"
                assert ("content-encoding" in answer.headers) is (coding != "identity")
                assert ("immutable" in answer.headers["cache-control"]) is bool(re.search("-[0-9a-f]{12}", name))


def test_the_script_is_valid() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    script = next(file.content for name, file in page_files().items() if name.endswith(".js"))
    done = subprocess.run([node, "--check", "--input-type=module", "-"], input=script, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_the_pages_have_no_inline_code_no_markup_from_strings_and_no_outside_address() -> None:
    own = [each for each in STATIC.rglob("*") if each.suffix in (".js", ".html", ".css") and "vendor" not in each.parts]
    assert len(own) > 8
    unsafe = r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for path in own:
        assert not re.search(unsafe, path.read_text().replace("http://www.w3.org/2000/svg", "")), path.name
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", (STATIC / "index.html").read_text())


async def test_bad_numbers_are_refused(tmp_path: Path) -> None:
    LogFile(tmp_path, "prefill-0").write("x")
    async with client_of(tmp_path) as client:
        for limit in ("0x", "-1", "1.5", "9" * 30, "5001"):
            answer = await client.get(f"/instances/prefill-0/logs?limit={limit}", headers=BEARER)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
        for path in ("/overview?since=x", "/overview?since=nan", "/overview?since_mark=1e999"):
            assert (await client.get(path)).status_code == 400


async def test_only_logs_of_instances_are_read(tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("no\n")
    async with client_of(tmp_path) as client:
        for name in ("secret", "..%2fsecret", "%2e%2e", "prefill-9"):
            answer = await client.get(f"/instances/{name}/logs", headers=BEARER)
            assert answer.status_code == 404, name
        answer = await client.get("/instances/prefill-0/logs", headers=BEARER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_logs")
