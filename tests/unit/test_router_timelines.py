"""Timelines of requests at the router."""

from __future__ import annotations

import time

import pytest

from pd_cluster import wire
from pd_cluster.cluster.routing.timeline import Timeline
from pd_cluster.errors import DeadlineExceeded, GenerationError
from pd_cluster.types import LegEnd
from tests.support.router_world import World, rest_of, token

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
    world = World(request_timeout_s=0.5)
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
    assert "longer than 0.5 s" in timeline_of(world, late).error
    assert {told(timeline_of(world, each))[-1] for each in (broken, left, late)} == {"scheduler: failed"}
