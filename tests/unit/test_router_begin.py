"""The start and the end of a request in the router: goals, a start without instances, failures, timelines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.api.gate.error_answers import error_response
from pd_cluster.cluster.routing import stream as stream_module
from pd_cluster.cluster.routing.predict import Goals
from pd_cluster.cluster.routing.stream import RequestStream
from pd_cluster.cluster.routing.timeline import Timeline
from pd_cluster.errors import DeadlineExceeded, GenerationError, Overloaded, Unavailable
from pd_cluster.types import LegEnd
from tests.support.router_world import World, rest_of, run, token, turns


async def test_what_would_be_too_late_is_refused_before_anything_is_sent() -> None:
    world = World(goals=Goals(ttft_s=1.0))
    for prefill in world.instances[:2]:
        prefill.load = msgspec.structs.replace(prefill.load, prefill_tokens_per_s=100.0)
        prefill.outstanding_tokens = 400
    with pytest.raises(Overloaded, match="first token would come after 4 s, and 1 s are promised") as caught:
        await anext(world.serve())
    assert (world.mailbox.sent, world.router.num_streams) == ([], 0)
    answer = error_response(caught.value, "/v1/completions")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    world.instances[1].outstanding_tokens = 0
    _, first, _ = await world.begin()
    assert [conn for conn, _ in world.mailbox.of(wire.Submit)] == ["to-prefill-1", "to-decode-0"]
    first.cancel()


async def test_a_router_that_has_just_begun_waits_for_its_instances() -> None:
    world = World()
    for instance in world.instances:
        instance.state = "connecting"
    with pytest.raises(Unavailable):
        await anext(world.serve())
    world.router.expect_instances()
    waiting = asyncio.ensure_future(anext(world.serve()))
    await turns()
    assert not waiting.done()
    assert world.mailbox.sent == []
    for instance in world.instances:
        instance.state = "ready"
    world.membership.changed.set()
    await world.until(wire.Submit, 2)
    waiting.cancel()


@pytest.mark.parametrize("why", ["fault", "deadline", "unread"])
def test_a_request_that_fails_leaves_nothing_for_the_collector(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception knows the frames that it came through; none of them may know the exception."""
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", 0)
    monkeypatch.setattr(stream_module, "MAX_UNREAD_STEPS", 0)

    async def test() -> None:
        world = World(request_timeout_s=0.2 if why == "deadline" else 0.0)
        serving, first, rid = await world.begin()
        if why == "fault":
            world.outputs("to-prefill-0", ended=LegEnd(rid, 0, "the request's own"))
        with contextlib.suppress(GenerationError):
            if why == "unread":
                world.outputs("to-prefill-0", token(rid, 0), *(token(rid, at) for at in range(1, 4)))
                await first
                world.outputs("to-decode-0", token(rid, 1))
                world.outputs("to-decode-0", token(rid, 2))
                await anext(serving)
            await first
        assert world.router.num_streams == 0
        del first, serving  # this frame is one of them, too

    def streams() -> list[object]:
        return [each for each in gc.get_objects() if type(each) is RequestStream]

    gc.collect()
    gc.disable()
    try:
        before = len(streams())
        run(test())
        assert len(streams()) == before
    finally:
        gc.enable()


# ---- timelines


def timeline_of(world: World, request_id: str) -> Timeline:
    found = world.router.timelines.find(request_id)
    assert found is not None
    return found


def told(timeline: Timeline) -> list[str]:
    return [f"{event['who']}: {event['what']}" for event in timeline.events()]


async def test_a_timeline_has_the_routers_and_the_workers_events() -> None:
    world = World()
    serving, first, rid = await world.begin(client_id="cmpl-1", received_s=0.0)
    transfer_id = world.mailbox.of(wire.Submit)[0][1].transfer_id
    now_s = time.monotonic()
    world.router.timelines.heard("to-prefill-0", now_s)
    events = [wire.TraceEvent(transfer_id, now_s, "chunk"), wire.TraceEvent("another", now_s, "chunk")]
    world.router.on_outputs("to-prefill-0", wire.Outputs([token(rid, 0)], events=events, now_s=now_s))
    await first
    world.outputs("to-decode-0", token(rid, 0), token(rid, 1, finish="length"))
    assert await rest_of(serving) == [1]
    found = timeline_of(world, "cmpl-1")
    assert (found.ids, found.received_s, found.status) == (["cmpl-1", rid, transfer_id], 0.0, "finished")
    assert told(found) == [
        "scheduler: received",
        "scheduler: routed",
        "prefill-0: chunk",
        "scheduler: first token",
        "scheduler: finished",
    ]


async def test_a_timeline_says_why_a_request_failed() -> None:
    world = World(request_timeout_s=0.1)
    serving, first, broken = await world.begin()
    world.outputs("to-decode-0", ended=LegEnd(broken, 0, "out of luck"))
    with pytest.raises(GenerationError):
        await first
    assert timeline_of(world, broken).error == "decode-0: out of luck"
    serving, first, left = await world.begin()
    world.outputs(world.mailbox.of(wire.Submit)[-2][0], token(left, 0))
    await first
    await serving.aclose()
    assert timeline_of(world, left).error == "the client left before the end"
    _, first, late = await world.begin()
    with pytest.raises(DeadlineExceeded):
        await first
    assert "longer than 0.1 s" in timeline_of(world, late).error
    assert {told(timeline_of(world, each))[-1] for each in (broken, left, late)} == {"scheduler: failed"}
