"""Requests refused before their bodies are read: the queue is too long, or too many bodies are being read."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from pd_cluster.api.middleware import request_reservation
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.middleware.request_reservation import SMALL_NBYTES, BodyBudget
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.routing.request_admission import RequestAdmission
from pd_cluster.errors import Overloaded
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.hall import Hall
from tests.support.public_port import Answer, make_app, send
from tests.support.router_world import admission_of
from tests.support.until import until

MEGABYTE = 1 << 20
ADDRESS = "127.0.0.1"  # default client address
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
ASKS = [
    (True, CHAT_PATH, CHAT),
    (True, "/v1/completions", {"model": "tiny", "prompt": "hello"}),
    (False, "/generate", {"prompt": "hello"}),
]


def waiting_in(hall: Hall, stats: RequestStats | None = None) -> RequestAdmission:
    admission = admission_of(stats)
    admission.waiting = hall.room
    return admission


@pytest.mark.parametrize(("openai", "path", "body"), ASKS)
async def test_what_would_wait_too_long_is_refused_before_its_body_is_read(
    tmp_path: Path, openai: bool, path: str, body: dict[str, Any]
) -> None:
    hall, stats = Hall(max_wait_s=2.0), RequestStats()
    app, _ = make_app(tmp_path, HttpConfig(api_keys=("full", "free")), openai, admission=waiting_in(hall, stats))
    hall.close()
    tasks = await hall.waiting(3, f"key:{hashlib.sha256(b'full').hexdigest()}", 100)
    hall.measured(100)

    async def ask(key: str) -> Answer:
        return await send(app, "POST", path, [("authorization", f"Bearer {key}")], body)

    refused, free = await ask("full"), await ask("free")
    assert (refused.status, refused.num_received, refused.headers["retry-after"]) == (429, 0, "2")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert "the expected wait of 3 s is too long for the 2 s of --max-queue-time" in error["message"]
    assert free.status == 503  # the body was read; there is no instance
    assert free.num_received
    assert stats.snapshot().counters["refused_queue"] == 1
    hall.open()
    await asyncio.gather(*tasks)


async def test_a_clients_own_timeout_is_how_long_it_waits(tmp_path: Path) -> None:
    hall = Hall(max_wait_s=100.0)
    app, _ = make_app(tmp_path, admission=waiting_in(hall))
    hall.close()
    tasks = await hall.waiting(3, ADDRESS, 100)
    hall.measured(100)

    async def ask(value: str, header: str = "x-stainless-read-timeout") -> int:
        return (await send(app, "POST", CHAT_PATH, [(header, value)], CHAT)).status

    assert [await ask(value) for value in ("2", "600", "nan", "-1", "0", "soon", "")] == [429, *[503] * 6]
    assert await ask("2", "X-Stainless-Timeout") == 429
    hall.open()
    await asyncio.gather(*tasks)


async def test_requests_that_are_read_at_the_same_time_are_counted(tmp_path: Path) -> None:
    """Bodies being read count, so an empty queue does not admit a thousand simultaneous requests."""
    hall = Hall(max_wait_s=2.0)
    app, _ = make_app(tmp_path, admission=waiting_in(hall))
    hall.close()
    tasks = await hall.waiting(1, "", 10)
    hall.measured(100)
    release = asyncio.Event()
    body = json.dumps(CHAT).encode() + b" " * 240
    answers = [_asking(app, body, release, told_nbytes=len(body)) for _ in range(10)]
    await until(lambda: sum(answer.done() for answer in answers) >= 8)
    release.set()
    assert sorted(await asyncio.gather(*answers)) == [429] * 8 + [503] * 2
    assert hall.room.queue.client("", 0.0).num_arriving_tokens == 0
    hall.open()
    await asyncio.gather(*tasks)


def _asking(
    app: Any, body: bytes, release: asyncio.Event, path: str = CHAT_PATH, told_nbytes: int = 0, ends: bool = True
) -> asyncio.Future[int]:
    """Returns the status of a request whose body is sent, or finished, only after `release`."""
    parts = iter([body])

    async def receive() -> dict[str, Any]:
        if ends:
            await release.wait()
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": not ends}
        await (asyncio.Event() if ends else release).wait()
        return {"type": "http.disconnect"}

    async def ask() -> int:
        statuses: list[int] = []

        async def hear(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        length = [(b"content-length", str(told_nbytes).encode())] if told_nbytes else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": length, "query_string": b""}
        await app(scope, receive, hear)
        return statuses[0] if statuses else 0

    return asyncio.ensure_future(ask())


def test_bodies_share_a_budget_and_nobody_has_all_of_it() -> None:
    budget = BodyBudget(100 * MEGABYTE)
    budget.take("hog", 30 * MEGABYTE)
    budget.take("hog", 20 * MEGABYTE)
    with pytest.raises(Overloaded, match="bodies of 50 MiB are being read, 50 MiB of them yours, and"):
        budget.take("hog", 1)
    budget.take("guest", 25 * MEGABYTE)
    with pytest.raises(Overloaded):
        budget.take("guest", 1 * MEGABYTE)
    budget.take("third", 12 * MEGABYTE)
    budget.give_back("hog", 50 * MEGABYTE)
    budget.take("guest", 10 * MEGABYTE)
    for client, nbytes in (("guest", 35), ("third", 12)):
        budget.give_back(client, nbytes * MEGABYTE)
    assert [budget.taken_nbytes, *map(budget.of, ("hog", "guest", "third"))] == [0] * 4


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("told", [True, False])
async def test_unfinished_bodies_cannot_take_the_memory(
    tmp_path: Path, path: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reservation, "BODIES_NBYTES", 8 * MEGABYTE)
    app, _ = make_app(tmp_path)
    never = asyncio.Event()
    part, length = b"x" * (2 * MEGABYTE), (2 * MEGABYTE + 1) * told
    tasks = [_asking(app, part, never, path, length, ends=False) for _ in range(10)]
    await until(lambda: sum(each.done() for each in tasks) >= 8)
    assert [each.result() for each in tasks if each.done()] == [429] * 8
    small = await send(app, "POST", path, [], {"model": "tiny", "prompt": "hello"})
    assert small.status in (200, 503)  # the body is read
    never.set()
    await asyncio.gather(*tasks)
    large = await send(app, "POST", path, [], {"model": "tiny", "prompt": "hello", "user": "x" * 2 * MEGABYTE})
    assert large.status in (200, 503)


async def test_small_bodies_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reservation, "BODIES_NBYTES", 0)
    app, _ = make_app(tmp_path)
    asked = {"model": "tiny", "prompt": "hello"}
    small = {**asked, "user": "x" * (SMALL_NBYTES - len(json.dumps(asked)) - 20)}
    statuses = [
        (await send(app, "POST", "/tokenize", [], body)).status
        for body in (small, {**asked, "user": "x" * SMALL_NBYTES})
    ]
    assert statuses == [200, 429]


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("203.0.113.1", "203.0.113.1"),
        ("::ffff:203.0.113.1", "203.0.113.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1%eth0", "2001:db8::/64"),
        ("test:client", "test:client"),
    ],
)
def test_a_caller_without_a_key_is_its_address(address: str, client: str) -> None:
    """With IPv6 it is the address's network, because one subscriber has a whole network."""
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": (address, 5)}
    caller = caller_of(Request(scope))
    assert (caller.owner.client, caller.owner.client_timeout_s) == (client, float("inf"))
