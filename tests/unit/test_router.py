"""A request across the cluster, with a mailbox that only remembers: order, doubles, aborts, losses, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from pd_cluster import wire
from pd_cluster.cluster.routing import stream as stream_module
from pd_cluster.cluster.routing.stream import RequestStream, TokenSequence, ask_of
from pd_cluster.cluster.routing.timeline import Timeline
from pd_cluster.errors import DeadlineExceeded, GenerationError, Unavailable
from pd_cluster.types import FinishReason, LegEnd, Order, PromptOutput, Sampling, TokenOutput
from tests.support.router_world import PROMPT, SAMPLING, World, ready, rest_of, run, token

# ---- Stream.put


def read_now(stream: RequestStream) -> list[TokenOutput]:
    """Returns the messages that a reader gets without waiting."""

    async def read() -> list[TokenOutput]:
        return [cast(TokenOutput, await stream.inbox.get()) for _ in range(len(stream.inbox))]

    return asyncio.run(read())


def test_tokens_leave_in_order_and_once_whatever_comes() -> None:
    """Messages are shuffled, doubled, or of other attempts: each sequence yields its longest gapless run so far."""
    instance = ready("prefill-0")
    for seed in range(300):
        rng = random.Random(seed)
        n = rng.randrange(1, 4)
        order = Order(PROMPT, SAMPLING)
        sequences = [TokenSequence(index) for index in range(n)]
        stream = RequestStream("r", 1, {}, order, ask_of(order), instance, instance, sequences, lambda conn, body: None)
        num_tokens = rng.randrange(1, 9)
        offered = [
            token("r", p, 1000 * i + 100 * a + p, attempt=a, index=i)
            for i in range(-1, n + 1)
            for p in range(num_tokens)
            for a in (0, 1, 1, 2)
        ]
        rng.shuffle(offered)
        come: set[tuple[int, int]] = set()
        left: list[list[TokenOutput]] = [[] for _ in range(n)]
        for item in offered[: rng.randrange(len(offered) + 1)]:
            stream.put(item)
            come |= {(item.index, item.position)} if item.attempt == 1 else set()
            for out in read_now(stream):
                left[out.index].append(out)
            for index in range(n):
                gapless = next(p for p in range(num_tokens + 1) if (index, p) not in come)
                assert [t.position for t in left[index]] == list(range(gapless))
                assert [t.token_id for t in left[index]] == [1000 * index + 100 + p for p in range(gapless)]


def test_tokens_told_together_leave_as_if_told_singly() -> None:
    """Cut anyhow, doubled, overlapping, out of order."""
    instance = ready("prefill-0")
    for seed in range(200):
        rng = random.Random(seed)
        order = Order(PROMPT, SAMPLING)
        stream = RequestStream(
            "r", 0, {}, order, ask_of(order), instance, instance, [TokenSequence()], lambda conn, body: None
        )
        token_ids = [100 + position for position in range(12)]
        told: list[TokenOutput] = []
        for _ in range(rng.randrange(1, 4)):
            cuts = sorted(rng.sample(range(1, 12), rng.randrange(6)))
            for start, stop in itertools.pairwise([0, *cuts, 12]):
                *earlier, last = token_ids[start:stop]
                finish: FinishReason | None = "length" if stop == 12 else None
                told.append(TokenOutput("r", 0, 0, stop - 1, last, finish, earlier=tuple(earlier)))
        if rng.random() < 0.5:
            rng.shuffle(told)
        for each in told:
            stream.put(each)
        left = [each for out in read_now(stream) for each in out.apart()]
        assert [(each.position, each.token_id) for each in left] == list(enumerate(token_ids))
        assert [each.finish_reason for each in left] == [None] * 11 + ["length"]
        assert list(stream.sequences[0].token_ids) == token_ids


# ---- Router.serve


def test_both_legs_get_the_request_and_each_other() -> None:
    async def test() -> None:
        world = World()
        serving, first, request_id = await world.begin()
        (p_conn, p), (d_conn, d) = world.mailbox.of(wire.Submit)
        assert (p_conn, d_conn) == ("to-prefill-0", "to-decode-0")
        assert (p.leg, d.leg) == ("prefill", "decode")
        assert (p.peer, d.peer) == (world.instances[2].key, world.instances[0].key)
        assert p.request_id == d.request_id == request_id
        assert p.transfer_id == d.transfer_id
        assert p.order.prompt_token_ids == d.order.prompt_token_ids == PROMPT
        assert p.order.sampling == d.order.sampling == SAMPLING
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await serving.aclose()
        world.assert_home()

    run(test())


def test_the_next_request_goes_to_the_others() -> None:
    async def test() -> None:
        world = World()
        begun = [await world.begin() for _ in range(3)]
        conns = [conn for conn, _ in world.mailbox.of(wire.Submit)]
        assert conns == [f"to-{name}" for i in (0, 1, 0) for name in (f"prefill-{i}", f"decode-{i}")]
        assert len({request_id for *_, request_id in begun}) == 3
        assert len({body.transfer_id for _, body in world.mailbox.of(wire.Submit)}) == 3
        for serving, first, _ in begun:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await serving.aclose()
        world.assert_home()

    run(test())


def test_a_whole_life() -> None:
    """P gives token one and hands over; D repeats it, out of order with the rest, and finishes."""

    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        world.outputs("to-prefill-0", token(rid, 0, 50))
        assert (await first).token_id == 50
        world.outputs("to-prefill-0", ended=LegEnd(rid, 0))
        assert world.instances[0].num_outstanding == 0
        assert world.instances[2].num_outstanding == 1
        world.outputs("to-decode-0", token(rid, 2), token(rid, 0, 50), token(rid, 1))
        world.outputs("to-decode-0", token(rid, 3, finish="length"))
        assert await rest_of(serving) == [1, 2, 3]
        assert world.aborted() == []
        world.assert_home()

    run(test())


def test_decode_may_be_faster_than_prefill() -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        world.outputs("to-decode-0", token(rid, 0, 50), token(rid, 1))
        world.outputs("to-prefill-0", token(rid, 0, 50), ended=LegEnd(rid, 0))
        world.outputs("to-decode-0", token(rid, 2, finish="stop"))
        assert (await first).position == 0
        assert await rest_of(serving) == [1, 2]
        world.assert_home()

    run(test())


def test_a_finish_on_token_one_aborts_decode() -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        world.outputs("to-prefill-0", token(rid, 0, finish="stop"))
        assert (await first).finish_reason == "stop"
        assert await rest_of(serving) == []
        assert world.aborted() == ["to-decode-0"]
        world.assert_home()

    run(test())


@pytest.mark.parametrize("conn", ["to-prefill-0", "to-decode-0"])
def test_an_error_of_a_leg_ends_the_request_and_names_the_instance(conn: str) -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        world.outputs("to-prefill-0", token(rid, 0))
        world.outputs(conn, ended=LegEnd(rid, 0, "out of luck"))
        assert (await first).position == 0
        with pytest.raises(GenerationError, match=f"^{conn[3:]}: out of luck$"):
            await anext(serving)
        other = {"to-prefill-0": "to-decode-0", "to-decode-0": "to-prefill-0"}[conn]
        assert world.aborted() == [other]
        world.assert_home()

    run(test())


def test_prefill_may_be_lost_after_it_handed_over() -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        world.outputs("to-prefill-0", token(rid, 0), ended=LegEnd(rid, 0))
        world.router.on_lost(world.instances[0], "gone")
        world.outputs("to-decode-0", token(rid, 0), token(rid, 1, finish="length"))
        assert (await first).position == 0
        assert await rest_of(serving) == [1]
        world.assert_home()

    run(test())


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_closing_aborts_both_legs(num_tokens: int) -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        if num_tokens:
            world.outputs("to-prefill-0", token(rid, 0))
            await first
        else:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await serving.aclose()
        assert world.aborted() == ["to-decode-0", "to-prefill-0"]
        assert {body.request_id for _, body in world.mailbox.of(wire.Abort)} == {rid}
        world.assert_home()
        world.outputs("to-decode-0", token(rid, 1), ended=LegEnd(rid, 0, "late"))
        world.router.on_lost(world.instances[2], "late")
        world.assert_home()

    run(test())


def test_the_deadline() -> None:
    async def test() -> None:
        world = World(request_timeout_s=0.5)
        serving, first, rid = await world.begin()
        (left_s,) = {body.deadline_s for _, body in world.mailbox.of(wire.Submit)}
        assert 0 < left_s <= 0.5
        world.outputs("to-prefill-0", token(rid, 0))
        assert (await first).position == 0
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.5 s"):
            await anext(serving)
        assert world.aborted() == ["to-decode-0", "to-prefill-0"]
        world.assert_home()

    run(test())


def test_a_reader_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its legs end when too much is unread; that can still be read, followed by the reason for the end."""
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", 3)
    monkeypatch.setattr(stream_module, "MAX_UNREAD_STEPS", 3)

    async def test() -> None:
        world = World()
        _, other_first, other = await world.begin()
        serving, first, rid = await world.begin(Sampling(max_tokens=99))
        world.outputs("to-prefill-1", token(rid, 0), ended=LegEnd(rid, 0))
        assert (await first).position == 0
        for position in range(1, 4):
            world.outputs("to-decode-1", token(rid, position))
        assert world.aborted() == []
        world.outputs("to-decode-1", token(rid, 4))
        world.outputs("to-decode-1", token(rid, 5), token(rid, 6))
        assert world.aborted() == ["to-decode-1"]
        assert [(await anext(serving)).position for _ in range(4)] == [1, 2, 3, 4]
        with pytest.raises(GenerationError, match="leaves more than 3 tokens unread"):
            await anext(serving)
        world.outputs("to-prefill-0", token(other, 0, finish="length"))
        assert (await other_first).position == 0

    run(test())


def test_an_answer_that_comes_at_once_is_not_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a beam search, and the last tokens of any."""
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", 3)
    monkeypatch.setattr(stream_module, "MAX_UNREAD_STEPS", 3)

    async def test() -> None:
        world = World()
        for sampling in (Sampling(max_tokens=9, beam_width=2), Sampling(max_tokens=4)):
            serving, first, rid = await world.begin(sampling)
            conn = world.mailbox.of(wire.Submit)[-2][0]
            last = sampling.max_tokens - 1
            world.outputs(conn, *(token(rid, p, finish="length" if p == last else None) for p in range(last + 1)))
            assert (await first).position == 0
            assert await rest_of(serving) == list(range(1, last + 1))
        world.assert_home()

    run(test())


def test_mail_of_others_changes_nothing() -> None:
    """Another attempt's tokens, a stranger's, an unknown request's: not delivered, no leg ends."""

    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        before = [(i.num_outstanding, i.outstanding_tokens) for i in world.instances]
        world.outputs("to-decode-0", token(rid, 0, attempt=1, finish="stop"), ended=LegEnd(rid, 1, "x"))
        world.outputs("to-decode-1", token(rid, 0, finish="stop"), ended=LegEnd(rid, 0, "x"))
        world.outputs("to-decode-0", token("nobody", 0), ended=LegEnd("nobody", 0, "x"))
        await asyncio.sleep(0)
        assert not first.done()
        assert [(i.num_outstanding, i.outstanding_tokens) for i in world.instances] == before
        world.outputs("to-prefill-0", token(rid, 0, 9, finish="length"))
        assert (await first).token_id == 9
        await serving.aclose()
        world.assert_home()

    run(test())


def test_nobody_there_is_unavailable_and_counts_nothing() -> None:
    async def test() -> None:
        world = World()
        for instance in world.instances:
            instance.state = "failed"
        with pytest.raises(Unavailable, match="no prefill and no decode instance is ready"):
            await anext(world.serve())
        assert world.mailbox.sent == []
        world.assert_home()

    run(test())


# ---- several sequences

THREE = Sampling(n=3, max_tokens=4)


async def read_all(serving: AsyncGenerator[TokenOutput, None], first: asyncio.Task[TokenOutput]) -> list[list[int]]:
    """Positions of each of three sequences, as they were delivered."""
    seen: list[list[int]] = [[], [], []]
    with contextlib.suppress(StopAsyncIteration):
        item = await first
        seen[item.index].append(item.position)
        async for item in serving:
            seen[item.index].append(item.position)
    return seen


def test_three_sequences_one_of_which_ends_on_p() -> None:
    async def test() -> None:
        world = World()
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
        world.assert_home()

    run(test())


def test_all_sequences_end_on_p_and_d_is_aborted() -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin(THREE)
        world.outputs("to-prefill-0", *(token(rid, 0, finish="length", index=i) for i in range(3)))
        assert await read_all(serving, first) == [[0], [0], [0]]
        assert world.aborted() == ["to-decode-0"]
        world.assert_home()

    run(test())


def test_one_sequence_is_stopped() -> None:
    """It stops in both legs; its further tokens are dropped, the others continue to their ends."""

    async def test() -> None:
        world = World()
        streams: list[RequestStream] = []
        serving, first, rid = await world.begin(THREE, routed=streams.append)
        world.outputs("to-prefill-0", *(token(rid, 0, index=i) for i in range(3)))
        assert (await first).index == 0
        streams[0].stop(1)
        streams[0].stop(1)
        assert world.aborted(1) == ["to-decode-0", "to-prefill-0"]
        world.outputs("to-prefill-0", ended=LegEnd(rid, 0))
        world.outputs("to-decode-0", *(token(rid, p, index=i) for p in (0, 1) for i in range(3)))
        world.outputs("to-decode-0", *(token(rid, 2, finish="length", index=i) for i in (0, 2)))
        seen = [(item.index, item.position) async for item in serving]
        assert seen == [(2, 0), (0, 1), (2, 1), (0, 2), (2, 2)]
        assert world.aborted() == []
        world.assert_home()

    run(test())


def test_stopping_all_ends_the_request() -> None:
    async def test() -> None:
        world = World()
        streams: list[RequestStream] = []
        serving, first, rid = await world.begin(THREE, routed=streams.append)
        world.outputs("to-prefill-0", *(token(rid, 0, index=i) for i in range(3)))
        await first
        rest = asyncio.ensure_future(anext(serving, None))  # it may even be waiting
        await rest
        for index in range(3):
            streams[0].stop(index)
        assert await anext(serving, None) is None
        assert world.aborted() == ["to-decode-0", "to-prefill-0"]
        assert world.aborted(2) == []
        world.assert_home()

    run(test())


def test_workers_are_told_which_batch_an_answer_is_of() -> None:
    async def test() -> None:
        world = World()
        serving, first, request_id = await world.begin(batch="b")
        assert [submit.order.batch for _, submit in world.mailbox.of(wire.Submit)] == ["b", "b"]
        world.outputs("to-prefill-0", prompt=PromptOutput(request_id, 0, 0))
        world.outputs(world.router._streams[request_id].decode.conn, token(request_id, 0, finish="length"))
        await first
        await rest_of(serving)
        world.assert_home()

    run(test())


def test_who_gathers_is_woken_for_the_last_token_or_for_many() -> None:
    async def test() -> None:
        world = World()
        serving, first, request_id = await world.begin(gathers=True)
        conn = world.router._streams[request_id].decode.conn
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
        world.assert_home()

    run(test())


def test_who_gathers_is_woken_for_many_tokens_that_come_together() -> None:
    async def test() -> None:
        world = World()
        serving, first, request_id = await world.begin(Sampling(max_tokens=9), gathers=True)
        conn = world.router._streams[request_id].decode.conn
        world.outputs("to-prefill-0", prompt=PromptOutput(request_id, 0, 0))
        world.outputs(conn, token(request_id, 0))
        await asyncio.sleep(0)
        assert not first.done()
        world.outputs(conn, TokenOutput(request_id, 0, 0, 4, 7, earlier=(4, 5, 6)))
        assert [(await first).position, (await anext(serving)).earlier] == [0, (4, 5, 6)]
        world.outputs(conn, TokenOutput(request_id, 0, 0, 8, 7, "length", earlier=(4, 5, 6)))
        assert (await anext(serving)).finish_reason == "length"
        await rest_of(serving)
        assert world.router.stats.snapshot().counters["generation_tokens"] == 9
        world.assert_home()

    run(test())


def test_who_gathers_had_the_first_token_when_it_came() -> None:
    """However long the reader sleeps after it."""

    async def test() -> None:
        world = World()
        serving, first, request_id = await world.begin(Sampling(max_tokens=3), gathers=True)
        stream = world.router._streams[request_id]
        world.outputs("to-prefill-0", token(request_id, 0), prompt=PromptOutput(request_id, 0, 0))
        came_s = stream.first_s
        world.outputs(stream.decode.conn, TokenOutput(request_id, 0, 0, 2, 7, "length", earlier=(6,)))
        await first
        timeline = world.router.timelines.find(request_id)
        assert timeline is not None
        assert (came_s, "first token") in timeline.own
        await rest_of(serving)
        world.assert_home()

    run(test())


def test_a_reader_that_waits_is_woken_by_the_last_stop() -> None:
    async def test() -> None:
        world = World()
        streams: list[RequestStream] = []
        serving, first, _ = await world.begin(routed=streams.append)
        await asyncio.sleep(0)
        streams[0].stop(0)
        with pytest.raises(StopAsyncIteration):
            await first
        assert await anext(serving, None) is None
        assert world.aborted() == ["to-decode-0", "to-prefill-0"]
        world.assert_home()

    run(test())


# ---- the prompt's own outputs


def test_the_prompt_is_told_once_and_before_any_token() -> None:
    """D may be faster; its tokens wait for what P has to say."""

    async def test() -> None:
        world = World()
        told: list[PromptOutput] = []
        serving, first, rid = await world.begin(prompted=told.append, cache_salt="mine")
        assert [body.order.cache_salt for _, body in world.mailbox.of(wire.Submit)] == ["mine", "mine"]
        world.outputs("to-decode-0", token(rid, 0), token(rid, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not first.done()
        world.outputs("to-prefill-0", prompt=PromptOutput(rid, 1, 99))
        assert told == []
        world.outputs("to-prefill-0", token(rid, 0), ended=LegEnd(rid, 0), prompt=PromptOutput(rid, 0, 16))
        world.outputs("to-decode-0", token(rid, 2, finish="length"), prompt=PromptOutput(rid, 0, 99))
        assert (await first).position == 0
        assert await rest_of(serving) == [1, 2]
        assert told == [PromptOutput(rid, 0, 16)]
        world.assert_home()

    run(test())


def test_without_p_nobody_waits_for_it() -> None:
    async def test() -> None:
        world = World()
        serving, first, rid = await world.begin()
        world.outputs("to-decode-0", token(rid, 0))
        world.outputs("to-prefill-0", ended=LegEnd(rid, 0))
        assert (await first).position == 0
        await serving.aclose()
        world.assert_home()

    run(test())


# ---- timelines


def timeline_of(world: World, request_id: str) -> Timeline:
    found = world.router.timelines.find(request_id)
    assert found is not None
    return found


def told(timeline: Timeline) -> list[str]:
    return [f"{event['who']}: {event['what']}" for event in timeline.events()]


def test_a_timeline_has_the_routers_and_the_workers_events() -> None:
    async def test() -> None:
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

    run(test())


def test_a_timeline_says_why_a_request_failed() -> None:
    async def test() -> None:
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

    run(test())


def test_a_timeline_of_a_request_that_was_stopped_is_finished() -> None:
    async def test() -> None:
        world = World()
        streams: list[RequestStream] = []
        serving, first, rid = await world.begin(routed=streams.append)
        world.outputs("to-prefill-0", token(rid, 0))
        await first
        streams[0].stop(0)
        await serving.aclose()
        assert timeline_of(world, rid).status == "finished"

    run(test())


def test_random_lives_come_home() -> None:
    """Many requests at once, each with a random end; counts return to zero and every sequence is a gapless prefix."""

    async def one(world: World, rng: random.Random) -> None:
        n = rng.randrange(1, 4)
        streams: list[RequestStream] = []
        serving, first, rid = await world.begin(Sampling(n=n, max_tokens=4), routed=streams.append)
        p, d = (conn for conn, body in world.mailbox.of(wire.Submit) if body.request_id == rid)
        seen: list[list[int]] = [[] for _ in range(n)]

        async def read() -> None:
            with contextlib.suppress(GenerationError, StopAsyncIteration):
                item = await first
                while True:
                    seen[item.index].append(item.position)
                    if rng.random() < 0.1:
                        streams[0].stop(item.index)
                    item = await anext(serving)

        reading = asyncio.ensure_future(read())
        ends = [rng.randrange(4) for _ in range(n)]
        tokens = [
            token(rid, at, finish="length" if at == end else None, index=index)
            for index, end in enumerate(ends)
            for at in range(end + 1)
        ]
        events = [*((p, item) for item in tokens if item.position == 0), *((d, item) for item in tokens)]
        rng.shuffle(events)
        for conn, item in events[: rng.randrange(len(events) + 1)]:
            world.outputs(conn, item)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        end = rng.randrange(3)
        if end == 0:
            world.outputs(d, ended=LegEnd(rid, 0, "failed"))
        elif end == 1:
            world.router.on_lost(next(i for i in world.instances if i.conn == p), "lost")
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await serving.aclose()
        assert seen == [list(range(len(positions))) for positions in seen]

    async def test() -> None:
        world = World()
        rng = random.Random(3)
        await asyncio.gather(*(one(world, random.Random(rng.random())) for _ in range(200)))
        world.assert_home()

    run(test())
