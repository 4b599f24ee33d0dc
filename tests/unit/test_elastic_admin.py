"""The admin port's commands for instances: tokens, ports and refusals."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import msgspec
import pytest

from pd_cluster.api.admin.admin_app import admin_app
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.api.middleware.admin_access import AdminAccess
from tests.support.elastic_world import ElasticWorld, busy

TOKEN = "a-token-of-some-length"


def send(
    world: ElasticWorld, path: str, body: Any = None, token: str | None = TOKEN, is_open: bool = True, raw: bytes = b""
) -> tuple[int, Any]:
    async def ask() -> httpx.Response:
        app = admin_app(world.elastic, LocalTimelines(world.router.timelines), AdminAccess(TOKEN, is_open))
        headers = {"Authorization": f"Bearer {token}".encode("latin-1")} if token is not None else {}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers
        ) as client:
            if body is None and not raw:
                return await client.get(path)
            return await client.post(path, content=raw or msgspec.json.encode(body))

    answer = asyncio.run(ask())
    return answer.status_code, answer.json()


KNOWN = ("localhost", "localhost:9001", "127.0.0.1:9001", "127.1.2.3", "[::1]:9001", "PD.example:9001", "[fd00::5]")
EVIL = ("evil.example:9001", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.5", "")


async def test_the_port_is_read_under_its_own_names_only() -> None:
    """Without the token, a Host header other than the port's own is refused, as from a page that rebinds its name."""
    access = AdminAccess(TOKEN, True, frozenset({"pd.example", "[fd00::5]"}))
    app = admin_app(ElasticWorld().elastic, LocalTimelines(ElasticWorld().router.timelines), access)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for host, path in itertools.product(KNOWN + EVIL, ("/instances", "/requests")):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status_code == (200 if host in KNOWN else 403), host
            token = {"Host": host, "Authorization": f"Bearer {TOKEN}"}
            assert (await client.get(path, headers=token)).status_code == 200


COMMANDS = [
    ("/instances", {"name": "prefill-0", "port": 1}),
    ("/instances/prefill-0/drain", {}),
    ("/instances/prefill-0/undrain", {}),
    ("/instances/prefill-0/remove", {}),
    ("/instances/prefill-0/role", {"role": "decode"}),
]


@pytest.mark.parametrize(("path", "body"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_commands_need_the_token(path: str, body: dict[str, Any]) -> None:
    world = ElasticWorld()
    for wrong in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", "\xfc"):
        status, answer = send(world, path, body, token=wrong)
        assert (status, answer["error"]["code"]) == (401, "invalid_admin_token")
        assert "Authorization: Bearer" in answer["error"]["message"]
    assert all(each.takes_requests for each in world.membership.instances)
    status, answer = send(world, path, body)
    assert (status, answer["instance_id"]) == (200, "prefill-0")


@pytest.mark.parametrize("path", ["/instances", "/requests", "/requests/x/timeline"])
def test_reading_needs_the_token_where_others_reach_the_port(path: str) -> None:
    world = ElasticWorld()
    assert send(world, path, token=None)[0] != 401
    assert send(world, path, token=None, is_open=False)[0] == 401
    assert send(world, path, is_open=False)[0] != 401


def test_the_list_shows_what_is_wanted_and_the_last_one_stays() -> None:
    world = ElasticWorld()
    busy(world["prefill-1"])
    assert send(world, "/instances/prefill-1/role", {"role": "decode", "timeout_s": 3})[0] == 200
    assert world["prefill-1"].drain_deadline_s == 3
    entries = {each["instance_id"]: each for each in send(world, "/instances")[1]["instances"]}
    shown = [entries["prefill-1"][name] for name in ("role", "next_role", "service", "state")]
    assert shown == ["prefill", "decode", "in", "changing"]
    world = ElasticWorld(num_prefill=1)
    assert send(world, "/instances/prefill-0/remove", {})[0] == 409
    assert send(world, "/instances/prefill-0/remove", {"force": True})[0] == 200


@pytest.mark.parametrize(
    ("path", "raw", "status", "said"),
    [
        ("/instances/nobody/drain", b"{}", 404, "there is no instance 'nobody'"),
        ("/instances/prefill-0/role", b'{"role": "both"}', 400, "role: 'both'; give prefill or decode"),
        ("/instances/prefill-0/drain", b'{"timeout_s": -1}', 400, "timeout_s: -1; give 0 to 86400 seconds"),
        ("/instances/prefill-0/drain", b'{"timeout_s": 1e99}', 400, "timeout_s"),
        ("/instances/prefill-0/drain", b'{"forse": true}', 400, "forse"),
        ("/instances/prefill-0/drain", b"\xff", 400, "body"),
        ("/instances", b'{"name": "prefill-0"}', 400, "port"),
        ("/instances", b'{"name": "prefill-0", "port": 0}', 400, "port: 0; give a port from 1 to 65535"),
        ("/instances", b'{"name": "prefill-0", "port": 1, "host": "1.2.3.4"}', 400, "host"),
        ("/instances", b'{"name": "prefill-9", "port": 1}', 404, "has no prefill-9"),
    ],
)
def test_wrong_commands_change_nothing(path: str, raw: bytes, status: int, said: str) -> None:
    world = ElasticWorld()
    found, answer = send(world, path, raw=raw)
    assert found == status
    assert said in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert all(each.takes_requests for each in world.membership.instances)
