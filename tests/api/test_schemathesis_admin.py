"""Sends valid and invalid requests generated from a document of the admin port's routes.

No answer may be a 5xx fault, refusals are well-formed errors, bodies that the document forbids are refused, and nothing
is done without the token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from pd_cluster.api.admin.admin_app import Add, AdminAccess, ChangeRole, DrainOptions, Nothing, admin_app
from pd_cluster.api.admin.control_routes import AbortIds, control_routes
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.cluster.members.cluster_control import ClusterControl
from pd_cluster.cluster.members.cluster_credentials import ADMIN_TOKEN_FILE
from tests.support.api_cases import MODES, each_case
from tests.support.cluster import LiveCluster
from tests.support.elastic_world import ElasticWorld

if TYPE_CHECKING:
    from schemathesis import Case

NUM_CASES, NUM_CASES_SLOW = 3, 40
NEED_WORKERS = ("/pause", "/sleep", "/reset_prefix_cache")
TOKEN = "t" * 32
REFUSALS = (400, 401, 403, 404, 405, 409, 413, 503)
SWITCH = {"enum": ["true", "false", "0", "1"]}
MODE = {"enum": ["abort", "wait", "keep"]}
BODIES: dict[str, type[msgspec.Struct] | None] = {  # bodies of every route that changes state
    "/instances": Add,
    "/instances/{name}/drain": DrainOptions,
    "/instances/{name}/undrain": Nothing,
    "/instances/{name}/remove": DrainOptions,
    "/instances/{name}/role": ChangeRole,
    "/abort_requests": AbortIds,
    "/inference/v1/abort_requests": AbortIds,
    **dict.fromkeys(("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up")),
}
QUERIES: dict[str, dict[str, Any]] = {
    "/reset_prefix_cache": {"reset_running_requests": SWITCH, "reset_external": SWITCH},
    "/pause": {"mode": MODE, "clear_cache": SWITCH, "wait_for_inflight_requests": SWITCH},
    "/sleep": {"level": {"enum": ["1", "2"]}, "mode": MODE},
    "/wake_up": {"tags": {"enum": ["weights,kv_cache"]}},
}


def document(own: dict[str, Any]) -> dict[str, Any]:
    """Adds bodies and queries to the app's document, which lists only routes."""
    kinds = [kind for kind in BODIES.values() if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, schemas, strict=True))
    for path, methods in own["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = {"default": {"description": "any"}}
            operation["parameters"] = [
                {**each, "schema": {"type": "string", "minLength": 1}}
                for each in operation.get("parameters", ())
                if each["in"] == "path"
            ]
            if method == "post":
                kind = BODIES[path]  # a new route needs an entry
                for name, schema in QUERIES.get(path, {}).items():
                    operation["parameters"].append({"name": name, "in": "query", "schema": schema})
                if kind is not None:
                    operation["requestBody"] = {"content": {"application/json": {"schema": schema_of[kind]}}}
    return {**own, "components": {"schemas": components}}


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_without_workers(mode: str) -> None:
    """Tests all operations except commands that wait for workers."""

    async def serve() -> list[Asked]:
        transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await ask(client, case, TOKEN) for case in cases]

    cases = [case for case in made(mode, NUM_CASES) if case.operation.path not in NEED_WORKERS]
    judge(mode, asyncio.run(serve()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_every_operation_of_a_real_cluster(mode: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    async def serve(cluster: LiveCluster) -> list[Asked]:
        async with httpx.AsyncClient(base_url=cluster.admin_url, trust_env=False, timeout=30) as client:
            found = [await ask(client, case, token) for case in made(mode, NUM_CASES_SLOW)]
            for command in ("wake_up", "resume"):
                answer = await client.post(f"/{command}", headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code == 200, answer.text
            return found

    with LiveCluster(tmp_path, checkpoint("llama"), arguments=["--max-model-len=128", "--num-blocks=64"]) as cluster:
        token = (cluster.folder / ADMIN_TOKEN_FILE).read_text().strip()
        judge(mode, asyncio.run(serve(cluster)))
        assert len(cluster.complete("again", 4)) == 4
        cluster.assert_home()


class Asked(NamedTuple):
    case: Case
    closed: httpx.Response  # the answer without the token
    answer: httpx.Response


def make_app() -> FastAPI:
    world = ElasticWorld()
    control = ClusterControl(world.membership, world.mailbox, world.router, 0.2)
    timelines = LocalTimelines(world.router.timelines)
    return admin_app(world.elastic, timelines, AdminAccess(TOKEN, True), None, control_routes(control, {}))


async def ask(client: httpx.AsyncClient, case: Case, token: str) -> Asked:
    fields = fields_of(case)
    closed = await client.request(case.method, **fields)
    fields["headers"] = {**fields["headers"], "Authorization": f"Bearer {token}"}
    return Asked(case, closed, await client.request(case.method, **fields))


def judge(mode: str, found: list[Asked]) -> None:
    statuses: dict[str, Counter[int]] = {}
    for case, closed, answer in found:
        label = case.operation.label
        statuses.setdefault(label, Counter())[answer.status_code] += 1
        told = (label, case.body, case.query, answer.status_code, answer.text[:300])
        assert answer.status_code == 200 or answer.status_code in REFUSALS, told
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], told
        if case.method.upper() == "POST":
            assert closed.status_code in (401, 404, 405), (label, closed.text)
        if mode == "negative" and case.operation.body and isinstance(case.body, list | str | int | float):
            assert answer.status_code != 200, told
    if mode == "positive":
        for label in ("GET /instances", "GET /server_info", "POST /resume"):
            assert statuses[label][200], (label, statuses[label])


def made(mode: str, num_cases: int) -> list[Case]:
    import schemathesis

    schema = schemathesis.openapi.from_dict(document(make_app().openapi()))
    found: list[Case] = []
    for operation in (result.ok() for result in schema.get_all_operations()):
        if mode == "negative" and not len(operation.body) and operation.path not in QUERIES:
            continue
        each_case(operation, mode, num_cases, lambda case, _: found.append(case))
    return found


def fields_of(case: Case) -> dict[str, Any]:
    """Returns httpx's arguments for a case."""
    sent = case.as_transport_kwargs(base_url="http://localhost")
    fields: dict[str, Any] = {
        "url": sent["url"].removeprefix("http://localhost"),
        "params": sent.get("params"),
        "headers": {},
    }
    fields["headers"] = {name: str(value) for name, value in dict(sent.get("headers") or {}).items()}
    if "json" in sent:
        fields["json"] = sent["json"]
    elif sent.get("data") is not None:
        fields["content"] = sent["data"]
    return fields
