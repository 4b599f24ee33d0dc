"""Resumable streams at a scheduler: reading, keeping and finding them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.api.middleware.http_bodies import Last
from pd_cluster.cluster.placement.routing_rules import ReplayLimits
from pd_cluster.cluster.streams.stream_records import KeptStream, RecordFinder, RecordPlace
from pd_cluster.errors import GenerationError, Overloaded, Unavailable
from pd_cluster.extras.resumable_streams.resume_records import STOPPED, TAKEN
from pd_cluster.extras.resumable_streams.stream_tickets import StreamTicket
from pd_cluster.extras.resumable_streams.ticketed_stream import numbered
from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.types import LegEnd, PromptOutput, RequestSpec, Sampling, TokenOutput
from tests.support.resume_values import DIGEST, OTHER, ROOM, WINDOW_S
from tests.support.router_world import World, turns


def test_a_token_is_bound_to_its_tenant_and_draws_the_same_ids() -> None:
    ticket = StreamTicket.new("one")
    assert len(bytes.fromhex(ticket.token)) == 16
    assert StreamTicket.of(ticket.token, "one") == ticket
    assert StreamTicket.of(ticket.token, "other").digest != ticket.digest
    form = ReplyFormat("mistral", "", {})
    ids = [[form.call_id("f", 0, draw) for _ in range(3)] for draw in (ticket.draws(), ticket.draws())]
    assert ids[0] == ids[1]
    assert len({*ids[0], form.call_id("f", 0), form.call_id("f", 0)}) == 5
    assert all(len(each) == 9 and each.isalnum() for each in ids[0])


async def test_events_have_ids_and_errors_have_none() -> None:
    async def read(after: int) -> list[bytes]:
        async def events() -> Any:
            yield b"data: {}\n\ndata: 1\n\n"
            yield b"data: 2\n\n"
            yield Last(b'data: {"error":1}\n\ndata: [DONE]\n\n')

        return [each async for each in numbered(events(), StreamTicket("t", DIGEST, after))]

    whole = b"".join(await read(-1))
    assert whole.startswith(b"id: t-0\ndata: {}\n\nid: t-1\ndata: 1\n\nid: t-2\ndata: 2\n\ndata: {")
    assert b"".join(await read(1)) == whole[whole.index(b"id: t-2") :]
    assert await read(9) == [b'data: {"error":1}\n\ndata: [DONE]\n\n']


def kept(outlives_client: bool = True, place: RecordPlace | None = None) -> KeptStream:
    own = KeptStream(wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe"), outlives_client=outlives_client)
    own.place = place
    return own


async def begun(world: World, outlives_client: bool = True) -> tuple[AsyncGenerator[TokenOutput, None], str]:
    """Begins a kept stream and reads its first token."""
    serving, first, name = await world.begin(kept=kept(outlives_client))
    world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
    await first
    return serving, name


def found_of(name: str, num_tokens: int = 1) -> wire.Found:
    return wire.Found(DIGEST, name, 0, RequestSpec([1, 2, 3], Sampling(max_tokens=9)), b"recipe", num_tokens)


@pytest.mark.parametrize(
    ("outlives_client", "is_stopping", "then"),
    [(True, False, "go on"), (False, False, "forget"), (False, True, "go on")],
)
async def test_a_client_that_leaves_lets_its_legs_go_on(
    world: World, outlives_client: bool, is_stopping: bool, then: Any
) -> None:
    """A stream that is kept only for lost schedulers ends with its client, unless this scheduler is stopping."""
    serving, name = await begun(world, outlives_client)
    assert [conn for conn, each in world.mailbox.of(wire.Submit) if each.keep is not None] == ["to-decode-0"]
    if is_stopping:
        world.router.end_all()
    await serving.aclose()
    assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, then))]
    assert world.aborted() == ([] if then == "go on" else ["to-prefill-0"])


async def test_the_next_attempt_keeps_what_was_delivered(world: World) -> None:
    serving, name = await begun(world)
    world.lose("decode-0")
    rest = asyncio.ensure_future(anext(serving))
    conn, submit = (await world.until(wire.Submit, 3))[-1]
    told, prompt = TokenOutput(name, 0, 0, 0, 5), PromptOutput(name, 0, 1)
    assert (submit.leg, submit.attempt) == ("hybrid", 1)
    assert submit.keep == wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe", prompt, [told])
    world.outputs(conn, TokenOutput(name, 1, 0, 1, 6, "length"))
    assert (await rest).token_id == 6
    assert [each async for each in serving] == []
    (released,) = world.mailbox.of(wire.Release)
    assert released[1] == wire.Release(name, 1, "stop")


def test_more_than_the_room_is_not_kept_by_the_next_attempt() -> None:
    small = KeptStream(wire.Keep(DIGEST, WINDOW_S, 300, b"recipe"))
    small.tokens = [TokenOutput("r", 0, 0, 0, 5)]
    assert small.of_next_attempt() is not None
    small.tokens.append(TokenOutput("r", 0, 0, 1, 5))
    assert small.of_next_attempt() is None


async def test_an_error_that_the_client_reads_is_the_end(world: World) -> None:
    serving, name = await begun(world)
    world.outputs("to-decode-0", ended=LegEnd(name, 0, "the request's deadline has passed"))
    with pytest.raises(GenerationError, match="deadline"):
        await anext(serving)
    assert [body.then for _, body in world.mailbox.of(wire.Release)] == ["forget"]
    assert world.aborted() == ["to-prefill-0"]


async def test_a_stream_resumes_from_its_first_token(world: World) -> None:
    serving, name = await begun(world)
    search = asyncio.ensure_future(world.router.find(DIGEST))
    await world.until(wire.Find, 4)
    with pytest.raises(GenerationError, match="another reader"):
        await anext(serving)
    assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, "go on"))]
    for instance in world.instances:
        found = found_of(name) if instance.name == "decode-0" else wire.Found(DIGEST)
        world.router.on_found(instance.conn, found)
    place = await search
    assert place is not None
    assert place.instance.name == "decode-0"
    reading = world.serve(kept=kept(place=place))
    token = asyncio.ensure_future(anext(reading))
    assert await world.until(wire.Attach, 1) == [("to-decode-0", wire.Attach(DIGEST, name, 0))]
    world.outputs("to-decode-0", TokenOutput(name, 0, 0, 0, 5))
    assert (await token).token_id == 5
    rest = asyncio.ensure_future(anext(reading))
    world.outputs("to-decode-0", ended=LegEnd(name, 0, TAKEN, is_taken=True))
    with pytest.raises(GenerationError, match="another reader"):
        await rest
    assert len(world.mailbox.of(wire.Release)) == 1  # a scheduler that lost the stream sends none


@pytest.mark.parametrize("is_here", [False, True])
async def test_a_stream_that_waits_for_an_instance_ends_for_a_later_reader(world: World, is_here: bool) -> None:
    """Covers a takeover at another scheduler, and two readers that find the stream at this one."""
    serving, name = await begun(world)
    for each in world.instances[1:]:
        each.state = "unreachable"
    world.instances[0].service = "out"
    rest = asyncio.ensure_future(anext(serving))
    world.outputs("to-decode-0", ended=LegEnd(name, 0, STOPPED, is_fault=True))
    await turns(5)  # lets it wait for an instance
    num_submitted = len(world.mailbox.of(wire.Submit))
    later = None
    if is_here:
        later = world.serve(kept=kept(place=RecordPlace(world.instances[2], found_of(name))))
        token = asyncio.ensure_future(anext(later))
        await world.until(wire.Attach, 1)
    else:
        world.outputs("to-decode-0", ended=LegEnd(name, 0, TAKEN, is_taken=True))
    world.instances[0].service = "in"
    world.membership.changed.set()
    with pytest.raises(GenerationError, match="another reader"):
        await rest
    assert len(world.mailbox.of(wire.Submit)) == num_submitted
    if later is not None:
        timeline = world.router.timelines.find(name)
        assert timeline is not None
        assert timeline.status not in ("failed", "finished")  # the later reader's timeline
        world.outputs("to-decode-0", TokenOutput(name, 0, 0, 0, 5))
        assert (await token).token_id == 5
        await later.aclose()


@pytest.mark.parametrize("why", ["nobody is ready", "one is lost", "one is silent"])
async def test_while_an_instance_is_away_a_stream_may_still_be_found(world: World, why: str) -> None:
    finder = RecordFinder(world.mailbox.send, world.membership, 0.01 if why == "one is silent" else 60.0)
    asked = 0 if why == "nobody is ready" else 4
    for each in world.instances[asked:]:
        each.state = "connecting"
    search = asyncio.ensure_future(finder.find(DIGEST))
    await world.until(wire.Find, asked)
    for each in world.instances[: min(asked, 3)]:
        finder.on_found(each.conn, wire.Found(DIGEST))
    if why == "one is lost":
        finder.on_lost(world.instances[3], "dead")
    with pytest.raises(Unavailable):
        await search


async def test_searches_end_without_those_that_are_lost_and_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = RecordFinder(world.mailbox.send, world.membership, 60.0)
    search = asyncio.ensure_future(finder.find(DIGEST))
    await world.until(wire.Find, 4)
    monkeypatch.setattr("pd_cluster.cluster.streams.stream_records.MOST_SEARCHES", 1)
    with pytest.raises(Overloaded):
        await finder.find(OTHER)
    for conn, attempt in (("to-decode-0", 0), ("to-decode-1", 1), ("to-decode-1", 9)):  # the instance has answered
        finder.on_found(conn, wire.Found(DIGEST, "r", attempt, RequestSpec([1], Sampling())))
    for instance in world.instances[:2]:
        finder.on_lost(instance, "dead")
    place = await search
    assert place is not None
    assert (place.instance.name, place.found.attempt) == ("decode-1", 1)


async def test_encoders_are_not_searched(world: World) -> None:
    world.instances[1].role = "encode"
    finder = RecordFinder(world.mailbox.send, world.membership, 60.0)
    search = asyncio.ensure_future(finder.find(DIGEST))
    await asyncio.sleep(0)
    for name in ("prefill-0", "decode-0", "decode-1"):
        finder.on_found(f"to-{name}", wire.Found(DIGEST))
    assert await search is None
    assert [conn for conn, _ in world.mailbox.of(wire.Find)] == ["to-prefill-0", "to-decode-0", "to-decode-1"]


async def test_a_scheduler_that_has_just_begun_waits_for_its_instances() -> None:
    world = World(replay=ReplayLimits(together_s=60.0))
    world.router.expect_instances()
    for instance in world.instances[1:]:
        instance.state = "connecting"
    search = asyncio.ensure_future(world.router.find(DIGEST))
    await asyncio.sleep(0)
    for instance in world.instances:
        assert not world.mailbox.of(wire.Find)
        instance.state = "ready"
        world.membership.changed.set()
        await asyncio.sleep(0)
    await world.until(wire.Find, 4)
    for instance in world.instances:
        world.router.on_found(instance.conn, wire.Found(DIGEST))
    assert await search is None
