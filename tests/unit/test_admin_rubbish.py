"""Malformed requests to the admin port get well-formed errors, never a 500, and nothing works without a token."""

from __future__ import annotations

import random
from typing import Any

import httpx

from pd_cluster.api.admin.admin_app import AdminAccess, admin_app
from pd_cluster.api.admin.control_routes import control_routes
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.cluster.members.cluster_control import ClusterControl
from tests.support.elastic_world import ElasticWorld

TOKEN = "t" * 32
QUERIES = ["", "mode=%00", "level=2&level=x", "mode=" + "k" * 5000, "tags=weights,%ff", "clear_cache=2", "a[]=1"]
BODIES = [b"", b"{", b"[]", b'{"request_ids": 5}', b'{"request_ids": ["' + b"x" * 9000 + b'"]}', b"\xff\xfe", b"null"]
BODIES += [b"[" * 9000, b'{"name": {}}', b'{"timeout_s": 1e400}', b'{"role": "\\ud800"}', b'{"port": -1, "name": "p"}']
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
RUN = ("/pause", "/resume", "/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up")  # succeed if valid


async def test_no_rubbish_is_a_fault() -> None:
    world = ElasticWorld()
    control = ClusterControl(world.membership, world.mailbox, world.router, 5.0)
    commands = control_routes(control, {})
    app = admin_app(world.elastic, LocalTimelines(world.router.timelines), AdminAccess(TOKEN, True), None, commands)
    paths = sorted(app.openapi()["paths"])
    assert {*RUN, "/is_sleeping", "/server_info", "/instances"} <= set(paths)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    rng = random.Random(0)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in paths:
            place = path.format(**dict.fromkeys(("name", "request_id"), "nobody\ud7ff"))
            for method in METHODS:
                for _ in range(6):
                    await _ask(client, method, place, rng)
    assert not control.is_paused
    assert not control.is_asleep


async def _ask(client: httpx.AsyncClient, method: str, place: str, rng: random.Random) -> None:
    query, body = rng.choice(QUERIES), rng.choice(BODIES)
    if place in RUN and not query and body in (b"", b"null"):
        query = "unknown=1"
    if place == "/resume" or (place in RUN and "=" not in query):
        query = "unknown=1"
    url = f"{place}?{query}"
    fields: dict[str, Any] = {"content": body}
    closed = await client.request(method, url, **fields)
    assert closed.status_code < 500, (method, url, body, closed.text)
    if method == "POST":
        assert closed.status_code in (401, 404, 405), (url, closed.text)
    answer = await client.request(method, url, headers={"Authorization": f"Bearer {TOKEN}"}, **fields)
    assert answer.status_code < 500, (method, url, body, answer.text)
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.json()["error"]["message"], (method, url, body)
