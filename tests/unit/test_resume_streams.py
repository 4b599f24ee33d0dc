"""Streams that resume, at a scheduler: what clients read, keep and look for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.api.gate.http import Last
from pd_cluster.api.openai.kept_streams import numbered
from pd_cluster.cluster.routing.replays import ReplayLimits
from pd_cluster.cluster.routing.resume import Finder, KeptStream, RecordPlace
from pd_cluster.engine.resume import STOPPED, TAKEN
from pd_cluster.errors import GenerationError, Overloaded, Unavailable
from pd_cluster.parsers.reply import ReplyFormat
from pd_cluster.service.resumption import Ticket
from pd_cluster.types import LegEnd, Order, PromptOutput, Sampling, TokenOutput
from tests.support.resume_values import DIGEST, OTHER, ROOM, WINDOW_S
from tests.support.router_world import World as RouterWorld


@pytest.fixture
def world() -> RouterWorld:
    return RouterWorld()


def test_a_token_is_bound_to_its_tenant_and_draws_the_same_ids() -> None:
    ticket = Ticket.new("one")
    assert len(bytes.fromhex(ticket.token)) == 16
    assert Ticket.of(ticket.token, "one") == ticket
    assert Ticket.of(ticket.token, "other").digest != ticket.digest
    form = ReplyFormat("mistral", "", {})
    ids = [[form.call_id("f", 0, draw) for _ in range(3)] for draw in (ticket.draws(), ticket.draws())]
    assert ids[0] == ids[1]
    assert len({*ids[0], form.call_id("f", 0), form.call_id("f", 0)}) == 5
    assert all(len(each) == 9 and each.isalnum() for each in ids[0])


async def test_events_have_ids_and_errors_have_none() -> None:
    async def events() -> Any:
        yield b"data: {}\n\ndata: 1\n\n"
        yield b"data: 2\n\n"
        yield Last(b'data: {"error":1}\n\ndata: [DONE]\n\n')

    async def read(after: int) -> list[bytes]:
        return [each async for each in numbered(events(), Ticket("t", DIGEST, after))]

    whole = b"".join(await read(-1))
    assert whole.startswith(b"id: t-0\ndata: {}\n\nid: t-1\ndata: 1\n\nid: t-2\ndata: 2\n\ndata: {")
    assert b"".join(await read(1)) == whole[whole.index(b"id: t-2") :]
    assert await read(9) == [b'data: {"error":1}\n\ndata: [DONE]\n\n']


def kept(digest: bytes = DIGEST) -> KeptStream:
    return KeptStream(wire.Keep(digest, WINDOW_S, ROOM, b"recipe"))


async def test_a_client_that_leaves_lets_its_legs_go_on(world: RouterWorld) -> None:
    serving, first, name = await world.begin(kept=kept())
    assert [conn for conn, each in world.mailbox.of(wire.Submit) if each.keep is not None] == ["to-decode-0"]
    prompt = PromptOutput(name, 0, 1)
    world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=prompt)
    await first
    await serving.aclose()
    assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, "go on"))]
    assert world.mailbox.of(wire.Abort) == []
    world.assert_home()


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_a_stream_for_lost_schedulers_alone_ends_when_its_client_leaves(
    world: RouterWorld, is_stopping: bool
) -> None:
    own = KeptStream(wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe"), outlives_client=False)
    serving, first, name = await world.begin(kept=own)
    world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
    await first
    if is_stopping:
        world.router.end_all()
    await serving.aclose()
    then, aborted = ("go on", []) if is_stopping else ("forget", ["to-prefill-0"])
    assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, then))]
    assert [conn for conn, _ in world.mailbox.of(wire.Abort)] == aborted
    world.assert_home()


async def test_the_next_attempt_keeps_what_was_delivered(world: RouterWorld) -> None:
    serving, first, name = await world.begin(kept=kept())
    told, prompt = TokenOutput(name, 0, 0, 0, 5), PromptOutput(name, 0, 1)
    world.outputs("to-prefill-0", told, prompt=prompt)
    await first
    world.lose("decode-0")
    rest = asyncio.ensure_future(anext(serving))
    while (submit := world.mailbox.of(wire.Submit)[-1][1]).attempt == 0:
        await asyncio.sleep(0)
    assert submit.leg == "hybrid"
    assert submit.keep == wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe", prompt, [told])
    world.outputs(world.mailbox.of(wire.Submit)[-1][0], TokenOutput(name, 1, 0, 1, 6, "length"))
    assert (await rest).token_id == 6
    assert [each async for each in serving] == []
    (released,) = world.mailbox.of(wire.Release)
    assert released[1] == wire.Release(name, 1, "stop")
    world.assert_home()


def test_more_than_the_room_is_not_kept_by_the_next_attempt() -> None:
    small = KeptStream(wire.Keep(DIGEST, WINDOW_S, 300, b"recipe"))
    small.tokens = [TokenOutput("r", 0, 0, 0, 5)]
    assert small.of_next_attempt() is not None
    small.tokens.append(TokenOutput("r", 0, 0, 1, 5))
    assert small.of_next_attempt() is None


async def test_an_error_that_the_client_reads_is_the_end(world: RouterWorld) -> None:
    serving, first, name = await world.begin(kept=kept())
    world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
    await first
    world.outputs("to-decode-0", ended=LegEnd(name, 0, "the request's deadline has passed"))
    with pytest.raises(GenerationError, match="deadline"):
        await anext(serving)
    assert [body.then for _, body in world.mailbox.of(wire.Release)] == ["forget"]
    assert world.aborted() == ["to-prefill-0"]
    world.assert_home()


async def test_a_stream_resumes_from_its_first_token(world: RouterWorld) -> None:
    serving, first, name = await world.begin(kept=kept())
    world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
    await first
    search = asyncio.ensure_future(world.router.find(DIGEST))
    while len(world.mailbox.of(wire.Find)) < 4:
        await asyncio.sleep(0)
    with pytest.raises(GenerationError, match="another reader"):
        await anext(serving)
    assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, "go on"))]
    order = Order([1, 2, 3], Sampling(max_tokens=9))
    for conn in ("to-prefill-0", "to-prefill-1", "to-decode-0", "to-decode-1"):
        found = wire.Found(DIGEST, name, 0, order, b"recipe", 1) if conn == "to-decode-0" else wire.Found(DIGEST)
        world.router.on_found(conn, found)
    place = await search
    assert place is not None
    assert place.instance.name == "decode-0"
    again = kept()
    again.place = place
    reading = world.serve(kept=again)
    token = asyncio.ensure_future(anext(reading))
    while not world.mailbox.of(wire.Attach):
        await asyncio.sleep(0)
    assert world.mailbox.of(wire.Attach) == [("to-decode-0", wire.Attach(DIGEST, name, 0))]
    world.outputs("to-decode-0", TokenOutput(name, 0, 0, 0, 5))
    assert (await token).token_id == 5
    rest = asyncio.ensure_future(anext(reading))
    world.outputs("to-decode-0", ended=LegEnd(name, 0, TAKEN, is_taken=True))
    with pytest.raises(GenerationError, match="another reader"):
        await rest
    assert len(world.mailbox.of(wire.Release)) == 1  # none by one that has lost it to another
    world.assert_home()


@pytest.mark.parametrize("is_here", [False, True])
async def test_a_stream_that_waits_for_an_instance_ends_for_a_later_reader(world: RouterWorld, is_here: bool) -> None:
    """Where it is taken over at another scheduler, and where two readers of this one found it at once."""
    serving, first, name = await world.begin(kept=kept())
    world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
    await first
    for each in world.instances[1:]:
        each.state = "unreachable"
    world.instances[0].service = "out"
    rest = asyncio.ensure_future(anext(serving))
    world.outputs("to-decode-0", ended=LegEnd(name, 0, STOPPED, is_fault=True))
    for _ in range(5):
        await asyncio.sleep(0)  # it waits for an instance
    num_submitted = len(world.mailbox.of(wire.Submit))
    later = None
    if is_here:
        again = kept()
        found = wire.Found(DIGEST, name, 0, Order([1, 2, 3], Sampling(max_tokens=9)), b"recipe", 1)
        again.place = RecordPlace(world.instances[2], found)
        later = world.serve(kept=again)
        token = asyncio.ensure_future(anext(later))
        while not world.mailbox.of(wire.Attach):
            await asyncio.sleep(0)
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
        assert timeline.status not in ("failed", "finished")  # the later reader's
        world.outputs("to-decode-0", TokenOutput(name, 0, 0, 0, 5))
        assert (await token).token_id == 5
        await later.aclose()
    world.assert_home()


@pytest.mark.parametrize("why", ["nobody is ready", "one is lost", "one is silent"])
async def test_while_an_instance_is_away_a_stream_may_still_be_found(world: RouterWorld, why: str) -> None:
    finder = Finder(world.mailbox.send, world.membership, 0.01 if why == "one is silent" else 60.0)
    asked = 0 if why == "nobody is ready" else 4
    for each in world.instances[asked:]:
        each.state = "connecting"
    search = asyncio.ensure_future(finder.find(DIGEST))
    while len(world.mailbox.of(wire.Find)) < asked:
        await asyncio.sleep(0)
    for each in world.instances[: min(asked, 3)]:
        finder.on_found(each.conn, wire.Found(DIGEST))
    if why == "one is lost":
        finder.on_lost(world.instances[3], "dead")
    with pytest.raises(Unavailable):
        await search


async def test_searches_end_without_those_that_are_lost_and_are_bounded(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = Finder(world.mailbox.send, world.membership, 60.0)
    search = asyncio.ensure_future(finder.find(DIGEST))
    while len(world.mailbox.of(wire.Find)) < 4:
        await asyncio.sleep(0)
    monkeypatch.setattr("pd_cluster.cluster.routing.resume.MOST_SEARCHES", 1)
    with pytest.raises(Overloaded):
        await finder.find(OTHER)
    order = Order([1], Sampling())
    finder.on_found("to-decode-0", wire.Found(DIGEST, "r", 0, order))
    finder.on_found("to-decode-1", wire.Found(DIGEST, "r", 1, order))
    finder.on_found("to-decode-1", wire.Found(DIGEST, "r", 9, order))  # it has answered
    for name in ("prefill-0", "prefill-1"):
        finder.on_lost(next(each for each in world.instances if each.name == name), "dead")
    place = await search
    assert place is not None
    assert (place.instance.name, place.found.attempt) == ("decode-1", 1)


async def test_encoders_are_not_searched(world: RouterWorld) -> None:
    next(each for each in world.instances if each.name == "prefill-1").role = "encode"
    finder = Finder(world.mailbox.send, world.membership, 60.0)
    search = asyncio.ensure_future(finder.find(DIGEST))
    await asyncio.sleep(0)
    for name in ("prefill-0", "decode-0", "decode-1"):
        finder.on_found(f"to-{name}", wire.Found(DIGEST))
    assert await search is None
    assert [conn for conn, _ in world.mailbox.of(wire.Find)] == ["to-prefill-0", "to-decode-0", "to-decode-1"]


async def test_a_scheduler_that_has_just_begun_waits_for_its_instances() -> None:
    world = RouterWorld(replay=ReplayLimits(together_s=60.0))
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
    while len(world.mailbox.of(wire.Find)) < 4:
        await asyncio.sleep(0)
    for instance in world.instances:
        world.router.on_found(instance.conn, wire.Found(DIGEST))
    assert await search is None
    for instance in world.instances:
        instance.state = "unreachable"
    with pytest.raises(Unavailable):
        await Finder(world.mailbox.send, world.membership, 60.0).find(DIGEST)
