"""A trace of the cluster's traffic: what is kept of served requests, and what the admin port shows."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from pd_cluster import wire
from pd_cluster.api.admin.admin_app import admin_app
from pd_cluster.api.admin.served_trace import described, trace_lines
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.bench.trace_files import read_trace
from pd_cluster.cluster.placement.routing_rules import ServedLimits
from pd_cluster.cluster.routing.served_requests import BLOCK_TOKENS, ServedRequest, ServedRequests, keys_of_prompt
from pd_cluster.types import LegEnd, RequestSpec
from tests.support.elastic_world import ElasticWorld
from tests.support.router_world import SAMPLING, World, rest_of, token

SECRET = b"s" * 32


def prompts(num: int = 40, seed: int = 0) -> list[list[int]]:
    """Returns prompts, many with common prefixes whose lengths are not multiples of a block."""
    rng = random.Random(seed)
    found = [[rng.randrange(5) for _ in range(rng.randrange(1, 1500))]]
    while len(found) < num:
        before = rng.choice(found)
        kept = before[: rng.randrange(0, len(before) + 1)]
        found.append([*kept, *(rng.randrange(5) for _ in range(rng.randrange(1, 900)))])
    return [*found, list(found[3])]


def served(prompt: list[int], at_s: float, secret: bytes = SECRET) -> ServedRequest:
    return ServedRequest(at_s, len(prompt), 7, keys_of_prompt(RequestSpec(prompt, SAMPLING), secret))


@pytest.mark.parametrize("block_tokens", [512, 128, 384])
def test_ids_are_equal_where_whole_prefixes_are(tmp_path: Path, block_tokens: int) -> None:
    """Two ids of a trace are equal exactly if all tokens up to their blocks' ends are equal."""
    asked = prompts()
    requests = described([served(prompt, 100.0 + at) for at, prompt in enumerate(asked)])
    file = tmp_path / "served.jsonl"
    file.write_text("".join(trace_lines(requests, block_tokens)))
    found = read_trace(file)
    assert [each.num_prompt_tokens for each in found] == [*map(len, asked)]
    assert [each.at_s for each in found] == [float(at) for at in range(len(asked))]
    prefixes: dict[int, list[int]] = {}
    for arrival, prompt in zip(found, asked, strict=True):
        for at, hash_id in enumerate(arrival.hash_ids):
            prefix = prompt[: (at + 1) * block_tokens]
            assert prefixes.setdefault(hash_id, prefix) == prefix
    assert len({*map(tuple, prefixes.values())}) == len(prefixes)
    assert sorted(prefixes) == [*range(len(prefixes))]  # sequential numbers, which reveal nothing of the tokens
    assert found[-1].hash_ids == found[3].hash_ids


def test_keys_keep_to_secret_salt_and_variant() -> None:
    order = RequestSpec(prompts()[0], SAMPLING)
    same = keys_of_prompt(order, SECRET)
    assert len(same) == -(-len(order.prompt_token_ids) // BLOCK_TOKENS)
    others = [
        keys_of_prompt(order, b"t" * 32),
        keys_of_prompt(RequestSpec(order.prompt_token_ids, SAMPLING, cache_salt="a"), SECRET),
        keys_of_prompt(RequestSpec(order.prompt_token_ids, SAMPLING, variant="a"), SECRET),
    ]
    assert all(not {*same} & {*other} for other in others)


async def answer_one(world: World, num_tokens: int) -> None:
    serving, first, name = await world.begin()
    (prefill, _), (decode, _) = world.mailbox.of(wire.Submit)[-2:]
    world.outputs(prefill, token(name, 0), ended=LegEnd(name, 0))
    for at in range(1, num_tokens):
        world.outputs(decode, token(name, at, finish="length" if at + 1 == num_tokens else None))
    await first
    assert await rest_of(serving) == [*range(1, num_tokens)]


async def get(requests: ServedRequests | None, query: str = "") -> tuple[int, str]:
    world = ElasticWorld()
    source = LocalTimelines(world.router.timelines, requests)
    app = admin_app(world.elastic, source, AdminAccess("t" * 16, True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get(f"/requests/trace{query}")
    return answer.status_code, answer.text


async def test_the_last_served_requests_are_kept() -> None:
    world = World(keeps=ServedLimits(2, SECRET))
    for num_tokens in (2, 3, 4):
        await answer_one(world, num_tokens)
    serving, first, _ = await world.begin()
    await world.leave(serving, first)  # left before an answer
    kept = world.router.served.last()
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in kept] == [(3, 3), (3, 4)]
    assert kept[0].keys == kept[1].keys
    status, text = await get(world.router.served)
    assert status == 200
    assert [line.split('"timestamp"')[1].split(",", 1)[1] for line in text.splitlines()] == [
        f'"input_length":3,"output_length":{num},"hash_ids":[0]}}' for num in (3, 4)
    ]
    assert "[1, 2, 3]" not in text


async def test_old_requests_are_forgotten() -> None:
    now_s = 100.0
    world = World()
    requests = ServedRequests(world.router.streams, 10, SECRET, lambda: now_s)
    await answer_one(world, 2)
    (kept,) = requests.last()
    now_s = kept.received_s + 24 * 3600 + 1
    assert requests.last() == []


async def test_nothing_is_kept_unless_asked_for() -> None:
    world = World()
    await answer_one(world, 2)
    assert world.router.served.last() == []
    status, text = await get(world.router.served)
    assert (status, "start it with --trace-requests" in text) == (409, True)
    for wrong in ("0", "100", "-128", "x", "1" * 9):
        status, text = await get(ServedRequests(world.router.streams, 1, SECRET), f"?block_tokens={wrong}")
        assert (status, "give a multiple of 128" in text) == (400, True), wrong
