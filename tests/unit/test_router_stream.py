"""A stream delivers tokens in order and once; also the start and end of requests: goals, failures, timelines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import time
from typing import cast

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.api.middleware.error_responses import error_response
from pd_cluster.cluster.placement.wait_prediction import Goals
from pd_cluster.cluster.records.request_stats import Histogram, RequestStats
from pd_cluster.cluster.records.request_timeline import Timeline
from pd_cluster.cluster.streams import request_stream as stream_module
from pd_cluster.cluster.streams.request_origin import FROM_ANYBODY, AdmittedRequest
from pd_cluster.cluster.streams.request_stream import MAX_IN_A_ROW, Inbox, RequestStream, ask_of
from pd_cluster.cluster.streams.stream_records import KeptStream
from pd_cluster.errors import DeadlineExceeded, GenerationError, Overloaded, Unavailable
from pd_cluster.types import FinishReason, LegEnd, Logprobs, RequestSpec, TokenOutput
from tests.support.resume_values import DIGEST
from tests.support.router_world import PROMPT, SAMPLING, World, ready, rest_of, run, token, turns


def stream_of(num_sequences: int, attempt: int) -> RequestStream:
    order, instance = RequestSpec(PROMPT, msgspec.structs.replace(SAMPLING, n=num_sequences)), ready("prefill-0")
    admitted = AdmittedRequest(ask_of(order), instance, instance)
    return RequestStream("r", order, FROM_ANYBODY, admitted, lambda *_: None, RequestStats(), attempt)


def read_now(stream: RequestStream) -> list[TokenOutput]:
    """Returns the tokens that a reader gets without waiting."""

    async def read() -> list[TokenOutput]:
        return [cast(TokenOutput, await stream.inbox.get()) for _ in range(len(stream.inbox))]

    return asyncio.run(read())


def test_tokens_leave_in_order_and_once_whatever_comes() -> None:
    """With shuffled, repeated or foreign messages, each sequence yields its longest gapless run so far."""
    for seed in range(60):
        rng = random.Random(seed)
        n = rng.randrange(1, 4)
        stream = stream_of(n, attempt=1)
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
    """Groups of tokens may be of any size, repeated, overlapping and out of order."""
    for seed in range(60):
        rng = random.Random(seed)
        stream = stream_of(1, attempt=0)
        token_ids = [100 + position for position in range(12)]
        told: list[TokenOutput] = []
        for _ in range(rng.randrange(1, 4)):
            cuts = sorted(rng.sample(range(1, 12), rng.randrange(6)))
            for start, stop in itertools.pairwise([0, *cuts, 12]):
                *earlier, last = token_ids[start:stop]
                finish: FinishReason | None = "length" if stop == 12 else None
                logprobs = tuple(Logprobs(-position, 1) for position in range(start, stop))
                told.append(
                    TokenOutput(
                        *("r", 0, 0, stop - 1, last, finish, logprobs[-1]),
                        earlier=tuple(earlier),
                        earlier_logprobs=logprobs[:-1],
                    )
                )
        if rng.random() < 0.5:
            rng.shuffle(told)
        for each in told:
            stream.put(each)
        left = [each for out in read_now(stream) for each in out.apart()]
        assert [(each.position, each.token_id) for each in left] == list(enumerate(token_ids))
        assert [each.logprobs for each in left] == [Logprobs(-position, 1) for position in range(12)]
        assert [each.finish_reason for each in left] == [None] * 11 + ["length"]
        assert list(stream.sequences[0].token_ids) == token_ids


def test_tokens_of_a_step_are_told_once_and_their_time_is_spent_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers groups that overlap delivered tokens; records for resuming readers list tokens singly."""
    now_s, keep = 1.0, wire.Keep(DIGEST, 9.0, 9999, b"")
    stream = stream_of(1, attempt=0)
    stream.kept = KeptStream(keep)
    monkeypatch.setattr(stream.stats, "clock", lambda: now_s)
    groups = [(0, 1), (1, 4), (2, 6), (0, 5), (6, 8)]  # the third overlaps, the fourth is old
    delivered: list[tuple[int, int]] = []
    for start, stop in groups:
        now_s += 0.7
        *earlier, last = range(start, stop)
        stream.put(TokenOutput("r", 0, 0, stop - 1, last, earlier=tuple(earlier)))
        for each in read_now(stream):
            assert stream.take(each)
            delivered.append((each.position - len(each.earlier), each.position + 1))
    assert delivered == [(0, 1), (1, 4), (4, 6), (6, 8)]
    intervals = stream.stats.inter_token_s
    near = {0.7 / 3: 3, 0.35: 2, 0.71: 2}  # the last two arrive after twice the time
    counted = Histogram(intervals.bounds)
    for gap_s, number in near.items():
        counted.observe(gap_s, number)
    assert intervals.counts == counted.counts
    assert [(each.position, each.earlier) for each in stream.kept.tokens] == [(at, ()) for at in range(8)]
    stream.stop(0, num_dropped=1)
    assert (stream.sequences[0].num_taken, stream.stats.num_generation_tokens) == (7, 7)
    assert stream.sequences[0].finish_reason == "stop"


async def test_a_reader_of_many_ready_items_lets_others_have_their_turn() -> None:
    inbox, turns = Inbox(), 0
    for _ in range(4 * MAX_IN_A_ROW):
        inbox.put(None)

    async def count_turns() -> None:
        nonlocal turns
        while len(inbox):
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    while len(inbox):
        await inbox.get()
    await other
    assert 3 <= turns <= 6, "it must yield once per MAX_IN_A_ROW items, not for each"


async def test_what_would_be_too_late_is_refused_before_anything_is_sent() -> None:
    world = World(goals=Goals(ttft_s=1.0))
    for prefill in world.instances[:2]:
        prefill.load = prefill.load.at_rates(prefill_tokens_per_s=100.0)
        prefill.outstanding_tokens = 400
    with pytest.raises(Overloaded, match="first token would come after 4 s, and the objective is 1 s") as caught:
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
    """An exception refers to its frames, so no frame may refer to the exception, which would form a cycle."""
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
        del first, serving  # this frame must not refer to it, either

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
