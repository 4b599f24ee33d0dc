"""Requests kept during a pause leave their instances, wait without a limit, and continue after their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from pd_cluster import wire
from pd_cluster.cluster.streams.request_origin import ANYBODY
from pd_cluster.errors import DeadlineExceeded, RequestAborted, Unavailable
from pd_cluster.types import TokenOutput
from tests.support.router_world import World, token, turns


def submits(world: World) -> list[wire.Submit]:
    return [body for _, body in world.mailbox.of(wire.Submit)]


async def begun(world: World) -> tuple[AsyncGenerator[TokenOutput, None], str]:
    """Begins a request and reads its first token."""
    serving, first, request_id = await world.begin()
    for prefill in world.instances[:2]:
        world.outputs(prefill.conn, token(request_id, 0))
    assert (await first).position == 0
    return serving, request_id


async def test_it_goes_on_after_its_tokens() -> None:
    world = World()
    serving, request_id = await begun(world)
    following = asyncio.ensure_future(anext(serving))
    await world.router.control_requests("paused", keeps=True)
    await world.router.until_idle()
    assert world.router.num_waiting == 1
    world.assert_home()
    await turns()
    assert len(submits(world)) == 2
    await world.router.control_requests("open")
    await world.until(wire.Submit, 3)
    again = submits(world)[-1]
    assert (again.leg, again.attempt, [each.output_token_ids for each in again.resumed]) == ("hybrid", 1, [[7]])
    for instance in world.instances:
        world.outputs(instance.conn, token(request_id, 1, finish="length", attempt=1))
    assert (await following).position == 1
    await world.leave(serving)
    assert world.router.num_waiting == 0


@pytest.mark.parametrize("looks", [True, False])
async def test_one_that_looks_for_an_instance_is_kept_too(looks: bool) -> None:
    """A request that is looking for an instance is also kept, even if its reader reads only after the resume."""
    world = World()
    serving, _ = await begun(world)
    if looks:
        following = asyncio.ensure_future(anext(serving))
        for instance in world.instances:
            world.lose(instance.name)
        await turns()
        await world.router.control_requests("paused", keeps=True)
        for instance in world.instances:
            world.come_back(instance.name)
        world.membership.changed.set()
        await turns()
        assert len(submits(world)) == 2
    else:
        await world.router.control_requests("asleep", keeps=True)
        await world.router.control_requests("open")
        following = asyncio.ensure_future(anext(serving))
    await world.router.control_requests("open")
    await world.until(wire.Submit, 3)
    await world.leave(serving, following)


@pytest.mark.parametrize(
    ("way", "error"), [("command", RequestAborted), ("client", asyncio.CancelledError), ("deadline", DeadlineExceeded)]
)
async def test_it_can_end_meanwhile(way: str, error: type[BaseException]) -> None:
    world = World(request_timeout_s=0.05 if way == "deadline" else 0.0)
    serving, first, _ = await world.begin(client_id="cmpl-a")
    await world.router.control_requests("paused", keeps=True)
    await turns()
    if way == "command":
        await world.router.control_requests("paused", ["cmpl-a"])
    elif way == "client":
        first.cancel()
    with pytest.raises(error):
        await first
    await serving.aclose()
    assert world.router.num_waiting == 0
    await world.router.control_requests("open")
    await turns()
    assert len(submits(world)) == 2
    world.assert_home()


async def test_one_that_has_ended_and_is_not_read_yet_is_not_kept() -> None:
    world = World()
    serving, request_id = await begun(world)
    for instance in world.instances:
        world.outputs(instance.conn, token(request_id, 1, finish="stop"))
    await world.router.control_requests("paused", keeps=True)
    assert world.router.num_waiting == 0
    assert [each.finish_reason async for each in serving] == ["stop"]
    await world.router.until_idle()


@pytest.mark.parametrize("max_queue_s", [None, 5.0])
async def test_while_it_sleeps_requests_are_refused(max_queue_s: float | None) -> None:
    """Refuses waiting and new requests, also on their headers alone."""
    world = World(max_queue_s=max_queue_s)
    await world.router.control_requests("paused")
    waiting = asyncio.ensure_future(anext(world.serve()))
    await turns()
    await world.router.control_requests("asleep")
    for refused in (waiting, anext(world.serve())):
        with pytest.raises(Unavailable, match="the cluster is asleep") as caught:
            await refused
        assert caught.value.retry_after_s > 1
    with pytest.raises(Unavailable, match="the cluster is asleep"):
        world.router.admission.arrives(ANYBODY, 10)
    assert world.mailbox.sent == []
    await world.router.control_requests("open")
    serving, first, _ = await world.begin()
    await world.leave(serving, first)
