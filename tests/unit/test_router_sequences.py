"""Requests with several sequences at the router, gathering readers, and the prompt's own outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from pd_cluster import wire
from pd_cluster.cluster.streams import request_stream as stream_module
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.types import LegEnd, PromptOutput, Sampling, TokenOutput
from tests.support.router_world import PROMPT, World, rest_of, token, turns

# ---- several sequences

THREE = Sampling(n=3, max_tokens=4)


async def read_all(serving: AsyncGenerator[TokenOutput, None], first: asyncio.Task[TokenOutput]) -> list[list[int]]:
    """Returns the delivered positions of each of three sequences, in order."""
    seen: list[list[int]] = [[], [], []]
    with contextlib.suppress(StopAsyncIteration):
        item = await first
        seen[item.index].append(item.position)
        async for item in serving:
            seen[item.index].append(item.position)
    return seen


async def test_three_sequences_one_of_which_ends_on_p(world: World) -> None:
    serving, first, rid = await world.begin(THREE)
    assert world.instances[0].outstanding_tokens == len(PROMPT)
    assert world.instances[2].outstanding_tokens == len(PROMPT) + 3 * 4
    world.outputs("to-prefill-0", token(rid, 0), token(rid, 0, finish="stop", index=1), token(rid, 0, index=2))
    world.outputs("to-prefill-0", ended=LegEnd(rid, 0))
    assert [i.num_outstanding for i in world.instances] == [0, 0, 1, 0]
    world.outputs("to-decode-0", *(token(rid, p, index=i) for p in (0, 1) for i in (0, 2)))
    world.outputs("to-decode-0", token(rid, 2, index=2), token(rid, 2, finish="length"))
    assert world.instances[2].num_outstanding == 1
    world.outputs("to-decode-0", token(rid, 3, finish="length", index=2))
    assert await read_all(serving, first) == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert world.mailbox.of(wire.Abort) == []


async def test_all_sequences_end_on_p_and_d_is_aborted(world: World) -> None:
    serving, first, rid = await world.begin(THREE)
    world.outputs("to-prefill-0", *(token(rid, 0, finish="length", index=i) for i in range(3)))
    assert await read_all(serving, first) == [[0], [0], [0]]
    assert world.aborted() == ["to-decode-0"]


async def test_one_sequence_is_stopped_and_stopping_all_ends_the_request(world: World) -> None:
    """A stopped sequence ends in both legs and its further tokens are dropped; the others continue."""
    streams: list[RequestStream] = []
    serving, first, rid = await world.begin(THREE, routed=streams.append)
    world.outputs("to-prefill-0", *(token(rid, 0, index=i) for i in range(3)))
    assert (await first).index == 0
    for _ in range(2):
        streams[0].stop(1)
    assert world.aborted(1) == ["to-decode-0", "to-prefill-0"]
    world.outputs("to-decode-0", *(token(rid, p, index=i) for p in (0, 1) for i in range(3)))
    seen = [await anext(serving) for _ in range(3)]
    assert [(item.index, item.position) for item in seen] == [(2, 0), (0, 1), (2, 1)]
    for index in (0, 2):
        assert world.aborted() == []
        streams[0].stop(index)
    assert await anext(serving, None) is None
    assert world.aborted() == ["to-decode-0", "to-prefill-0"]
    assert world.aborted(2) == []


async def test_who_gathers_is_woken_for_the_last_token_or_for_many(world: World) -> None:
    serving, first, request_id = await world.begin(gathers=True)
    conn = world.router.streams.find(request_id).decode.conn
    world.outputs("to-prefill-0", prompt=PromptOutput(request_id, 0, 0))
    for position in range(stream_module.NUM_GATHERED):
        await asyncio.sleep(0)
        assert not first.done()
        world.outputs(conn, token(request_id, position))
    assert (await first).position == 0
    assert [(await anext(serving)).position for _ in range(1, stream_module.NUM_GATHERED)][-1] == 63
    rest = asyncio.ensure_future(anext(serving))
    await asyncio.sleep(0)
    world.outputs(conn, token(request_id, 64))
    await asyncio.sleep(0)
    assert not rest.done()
    world.outputs(conn, token(request_id, 65, finish="length"))
    assert [(await rest).position, (await anext(serving)).position] == [64, 65]
    await rest_of(serving)


async def test_who_gathers_is_woken_for_many_tokens_that_come_together(world: World) -> None:
    """A gathering reader is woken for many tokens at once, but the first token's time does not depend on that."""
    serving, first, request_id = await world.begin(Sampling(max_tokens=9), gathers=True)
    stream = world.router.streams.find(request_id)
    world.outputs("to-prefill-0", prompt=PromptOutput(request_id, 0, 0))
    world.outputs(stream.decode.conn, token(request_id, 0))
    came_s = stream.first_s
    await asyncio.sleep(0)
    assert not first.done()
    world.outputs(stream.decode.conn, TokenOutput(request_id, 0, 0, 4, 7, earlier=(4, 5, 6)))
    assert [(await first).position, (await anext(serving)).earlier] == [0, (4, 5, 6)]
    world.outputs(stream.decode.conn, TokenOutput(request_id, 0, 0, 8, 7, "length", earlier=(4, 5, 6)))
    assert (await anext(serving)).finish_reason == "length"
    await rest_of(serving)
    timeline = world.router.timelines.find(request_id)
    assert timeline is not None
    assert (came_s, "first token") in timeline.own
    assert world.router.stats.snapshot().counters["generation_tokens"] == 9


async def test_a_reader_that_waits_is_woken_by_the_last_stop(world: World) -> None:
    streams: list[RequestStream] = []
    serving, first, _ = await world.begin(routed=streams.append)
    await asyncio.sleep(0)
    streams[0].stop(0)
    with pytest.raises(StopAsyncIteration):
        await first
    assert await anext(serving, None) is None
    assert world.aborted() == ["to-decode-0", "to-prefill-0"]


# ---- the prompt's own outputs


async def test_the_prompt_is_told_once_and_before_any_token(world: World) -> None:
    """If D is faster, its tokens are held until P's outputs of the prompt."""
    told: list[PromptOutput] = []
    serving, first, rid = await world.begin(prompted=told.append)
    world.outputs("to-decode-0", token(rid, 0), token(rid, 1))
    await turns()
    assert not first.done()
    world.outputs("to-prefill-0", prompt=PromptOutput(rid, 1, 99))
    assert told == []
    world.outputs("to-prefill-0", token(rid, 0), ended=LegEnd(rid, 0), prompt=PromptOutput(rid, 0, 16))
    world.outputs("to-decode-0", token(rid, 2, finish="length"), prompt=PromptOutput(rid, 0, 99))
    assert (await first).position == 0
    assert await rest_of(serving) == [1, 2]
    assert told == [PromptOutput(rid, 0, 16)]


async def test_without_p_nobody_waits_for_it(world: World) -> None:
    serving, first, rid = await world.begin()
    world.outputs("to-decode-0", token(rid, 0))
    world.outputs("to-prefill-0", ended=LegEnd(rid, 0))
    assert (await first).position == 0
    await world.leave(serving)
