"""Requests at a router with an admission queue: sent when a leg ends, or refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.cluster.placement.wait_prediction import Goals
from pd_cluster.errors import GenerationError, Overloaded, RequestAborted, Unavailable
from pd_cluster.types import LegEnd, Sampling
from tests.support.hall import RATE, fill
from tests.support.router_world import World, token
from tests.support.until import until


@contextlib.asynccontextmanager
async def _full_world(**options: Any) -> AsyncGenerator[World, None]:
    world = World(**options)
    for prefill in world.instances[:2]:
        prefill.load = prefill.load.at_rates(prefill_tokens_per_s=RATE)
        fill(prefill)
    yield world


async def _until_sent(world: World, number: int) -> None:
    await until(lambda: len(world.mailbox.of(wire.Submit)) >= number)


async def _until_waiting(world: World) -> None:
    await until(lambda: world.router.admission.num_waiting >= 1)


async def _given_up(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_is_sent_when_a_leg_ends() -> None:
    world = World(max_queue_s=0.0)
    prefill, decode = world.instances[0], world.instances[2]
    for instance in (world.instances[1], world.instances[3]):
        instance.state = "unreachable"
    prefill.load = prefill.load.at_rates(prefill_tokens_per_s=0.01)
    begun = [await world.begin() for _ in range(2)]
    third = asyncio.ensure_future(anext(world.serve()))
    await _until_waiting(world)
    assert len(world.mailbox.of(wire.Submit)) == 4
    request_id = begun[0][2]
    world.outputs(prefill.conn, token(request_id, 0), ended=LegEnd(request_id, 0))
    await _until_sent(world, 6)
    assert decode.num_sequences == 3
    await _given_up(third, *(first for _, first, _ in begun))
    for serving, _, _ in begun:
        await serving.aclose()
    await _home(world)


async def test_a_request_that_cannot_be_sent_does_not_keep_others_waiting() -> None:
    world = World(max_queue_s=0.0)
    with pytest.raises(OverflowError):
        async for _ in world.serve(Sampling(max_tokens=4, seed=1 << 70)):
            pass
    serving, first, _ = await world.begin()
    await _given_up(first)
    await serving.aclose()
    await _home(world)


async def test_nobody_waits_when_the_end_has_come() -> None:
    async with _full_world(max_queue_s=0.0) as world:
        world.router.end_all()
        with pytest.raises(Unavailable, match="the server is shutting down"):
            await anext(world.serve())
        assert world.mailbox.sent == []
    async with _full_world(max_queue_s=0.0) as world:
        waiting = asyncio.ensure_future(anext(world.serve()))
        await _until_waiting(world)
        for instance in world.instances:
            instance.state = "unreachable"
        world.membership.changed.set()
        with pytest.raises(Unavailable):
            await waiting


async def _home(world: World) -> None:
    await until(lambda: not world.router.num_streams)
    world.assert_home()
    assert [instance.num_sequences for instance in world.instances] == [0] * 4
    assert world.router.admission.num_waiting == 0


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_queue_s": 0.0, "request_timeout_s": 0.01}, GenerationError, r"waited in the queue for 0\.01 s"),
        ({"max_queue_s": 0.0, "goals": Goals(ttft_s=0.01)}, Overloaded, r"waited for the 0\.01 s of --slo-ttft"),
        ({"max_queue_s": 0.01}, Overloaded, r"0\.01 s"),
    ],
)
async def test_a_request_that_waits_too_long_is_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    async with _full_world(**options) as world:
        with pytest.raises(error, match=said):
            await anext(world.serve())
        assert world.mailbox.sent == []
        assert world.router.stats.snapshot().counters["refused_queue"] == (error is Overloaded)


async def test_tokens_are_counted_for_the_client_that_got_them() -> None:
    world = World(max_queue_s=0.0)
    serving, first, request_id = await world.begin(Sampling(max_tokens=200))
    conn = world.mailbox.of(wire.Submit)[1][0]
    world.outputs("to-prefill-0", token(request_id, 0), ended=LegEnd(request_id, 0))
    world.outputs(conn, token(request_id, 1, finish="stop"))
    await first
    assert [each.position async for each in serving] == [1]
    client = world.router.admission.waiting.queue.clients[""]  # type: ignore[union-attr]
    assert (client.num_served_tokens, client.num_sequences, client.num_begun) == (3 + 2, 0, 0)


def _first_token(world: World, request_id: str) -> None:
    for prefill in world.instances[:2]:
        world.outputs(prefill.conn, token(request_id, 0))


@pytest.mark.parametrize("max_queue_s", [None, 0.0])
async def test_while_it_is_paused_requests_wait(max_queue_s: float | None) -> None:
    world = World(max_queue_s=max_queue_s)
    serving, first, request_id = await world.begin()
    await world.router.control_requests("paused")
    second = asyncio.ensure_future(anext(world.serve()))
    _first_token(world, request_id)
    assert (await first).position == 0  # running requests continue
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(world.mailbox.of(wire.Submit)) == 2
    await world.router.control_requests("open")
    await _until_sent(world, 4)
    await _given_up(second)
    await serving.aclose()
    await world.router.until_idle()
    await _home(world)


async def test_a_pause_holds_requests_or_ends_them() -> None:
    world = World(max_queue_s=0.0)
    named, first, _ = await world.begin(client_id="cmpl-a")
    other, second, request_id = await world.begin(client_id="cmpl-b")
    await world.router.control_requests("open", ["cmpl-a", "cmpl-c"])
    with pytest.raises(RequestAborted):
        await first
    _first_token(world, request_id)
    assert (await second).position == 0
    counters = world.router.stats.snapshot().counters
    assert (counters["finished_abort"], counters["finished_error"]) == (1, 0)
    for serving in (named, other):
        await serving.aclose()
    await _home(world)
    world = World(max_queue_s=0.01)
    await world.router.control_requests("paused")
    with pytest.raises(Overloaded, match=r"paused by an operator: the request has waited for the 0\.01 s"):
        await anext(world.serve())
    assert world.mailbox.sent == []


async def test_all_requests_end_those_that_wait_too() -> None:
    world = World(max_queue_s=0.0)
    _, first, _ = await world.begin()
    await world.router.control_requests("paused")
    waiting = asyncio.ensure_future(anext(world.serve()))
    await _until_waiting(world)
    idle = asyncio.ensure_future(world.router.until_idle())
    await world.router.control_requests("paused", ())
    for task in (first, waiting):
        with pytest.raises(RequestAborted):
            await task
    await idle
    await world.router.control_requests("open")
    serving, task, _ = await world.begin()  # later requests are served as before
    await _given_up(task)
    await serving.aclose()
    await _home(world)
