"""The start and the end of a request in the router: goals, priorities, a start without instances, failures."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.api.gate.error_answers import error_response
from pd_cluster.cluster.routing import stream as stream_module
from pd_cluster.cluster.routing.predict import Goals
from pd_cluster.cluster.routing.stream import RequestStream
from pd_cluster.errors import GenerationError, Overloaded, Unavailable
from pd_cluster.types import LegEnd
from tests.support.router_world import World, run, token


async def test_what_would_be_too_late_is_refused_before_anything_is_sent() -> None:
    world = World(goals=Goals(ttft_s=1.0))
    for prefill in world.instances[:2]:
        prefill.load = msgspec.structs.replace(prefill.load, prefill_tokens_per_s=100.0)
        prefill.outstanding_tokens = 400
    with pytest.raises(Overloaded, match="first token would come after 4 s, and 1 s are promised") as caught:
        await anext(world.serve())
    assert caught.value.retry_after_s == 4
    assert world.mailbox.sent == []
    assert world.router.num_streams == 0
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
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert world.mailbox.sent == []
    for instance in world.instances:
        instance.state = "ready"
    world.membership.changed.set()
    while not world.mailbox.of(wire.Submit):
        await asyncio.sleep(0)
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
