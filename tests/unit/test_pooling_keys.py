"""Embeddings at the public port with keys: limits, refunds, salts and priorities are those of other routes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.types import LegEnd, PooledOutput
from tests.support.keyed_port import Port, key_of
from tests.support.public_port import Answer

VECTOR = struct.pack("<2f", 3.0, 4.0)
INPUT = [[1, 2, 3], [4, 5]]
Make = Callable[..., Port]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda *keys: Port(tmp_path, keys)


async def submits(port: Port, count: int) -> list[tuple[str, wire.Submit]]:
    async with asyncio.timeout(20):
        while len(found := port.world.mailbox.of(wire.Submit)) < count:
            await asyncio.sleep(0)
    return list(found)


def embed(port: Port, key: str, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.ensure_future(port.ask(key, "POST", "/v1/embeddings", input=INPUT, model="tiny", **more))


async def test_prompt_tokens_are_reserved_and_charged_and_nothing_for_an_answer(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=8), key_of("other", tenant="b", tokens_per_minute=100))
    task = embed(port, "k")
    legs = await submits(port, 2)
    assert port.left("k")[1] == 8 - 5
    for conn, submit in legs:
        pooled = PooledOutput(submit.request_id, 0, VECTOR, num_cached_tokens=1)
        port.world.router.on_outputs(conn, wire.Outputs(pooled=[pooled]))
    answer = await task
    assert answer.status == 200
    body = answer.json()
    assert [each["embedding"] for each in body["data"]] == [[3.0, 4.0]] * 2
    cached = {"cached_tokens": 2}
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": cached}
    assert port.left("k")[1] == 8 - 5
    assert port.counted("prompt_tokens") == {"team": 5}
    refused = await embed(port, "k")
    assert refused.status == 429
    task = embed(port, "other", cache_salt="own")
    legs = await submits(port, 4)
    salts = {submit.order.cache_salt for _, submit in legs}
    assert len(salts - {"", "own"}) == 2  # each tenant has its own
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(port.world.mailbox.of(wire.Abort)) == 2
    port.world.assert_home()


async def test_one_prompt_that_fails_ends_all_and_gives_back_what_was_not_sent(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=100))
    task = embed(port, "k", dimensions=9)
    (conn, submit), _ = await submits(port, 2)
    port.world.outputs(conn, ended=LegEnd(submit.request_id, 0, "dimensions 9: too many", is_refusal=True))
    answer = await task
    assert answer.status == 400
    assert len(port.world.mailbox.of(wire.Abort)) == 1
    port.world.assert_home()
    answer = await embed(port, "k", priority=2)  # it needs a server that has them
    assert (answer.status, answer.json()["error"]["param"]) == (400, "priority")
    too_much = await port.ask("k", "POST", "/v1/embeddings", input=[[1] * 60, [2] * 60])
    assert too_much.status == 400
    assert too_much.json()["error"]["code"] == "larger_than_rate_limit"
