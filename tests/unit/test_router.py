"""A request's life at the router, with a recording mailbox: order, duplicates, aborts, losses, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.cluster.streams import request_stream as stream_module
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.errors import DeadlineExceeded, GenerationError
from pd_cluster.types import LegEnd, RequestSpec, Sampling
from tests.support.router_world import PROMPT, SAMPLING, World, info_of, rest_of, token

# ---- Router.serve


async def test_both_legs_get_the_request_and_each_other(world: World) -> None:
    asked: dict[str, Any] = {"priority": -3, "batch": "b", "cache_salt": "mine", "prediction": (5,), "may_draft": False}
    serving, first, request_id = await world.begin(**asked)
    (p_conn, p), (d_conn, d) = world.mailbox.of(wire.Submit)
    assert (p_conn, d_conn) == ("to-prefill-0", "to-decode-0")
    assert (p.leg, d.leg) == ("prefill", "decode")
    assert (p.peer, d.peer) == (world.instances[2].key, world.instances[0].key)
    assert p.request_id == d.request_id == request_id
    assert p.transfer_id == d.transfer_id
    assert p.order == d.order == RequestSpec(PROMPT, SAMPLING, **asked)
    await world.leave(serving, first)


async def test_the_next_request_goes_to_the_others(world: World) -> None:
    begun = [await world.begin() for _ in range(3)]
    conns = [conn for conn, _ in world.mailbox.of(wire.Submit)]
    assert conns == [f"to-{name}" for i in (0, 1, 0) for name in (f"prefill-{i}", f"decode-{i}")]
    assert len({request_id for *_, request_id in begun}) == 3
    assert len({body.transfer_id for _, body in world.mailbox.of(wire.Submit)}) == 3
    for serving, first, _ in begun[1:]:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await serving.aclose()
    await world.leave(*begun[0][:2])


@pytest.mark.parametrize(("num_tokens", "num_long"), [(16, 0), (17, 1)])
async def test_a_long_prompt_gives_way_at_its_prefill_instance_until_its_leg_ends(
    world: World, num_tokens: int, num_long: int
) -> None:
    for each in world.instances:
        each.info = info_of(each.name, each.role, max_num_batched_tokens=2)
    prefill, _, decode, _ = world.instances
    serving = world.router.serve(RequestSpec([1] * num_tokens, SAMPLING))
    first = asyncio.ensure_future(anext(serving))
    await world.until(wire.Submit, 2)
    assert (prefill.num_long, prefill.long_tokens, decode.num_long) == (num_long, num_long * num_tokens, 0)
    assert prefill.prompt_tokens_before(1) == (0 if num_long else num_tokens)
    assert prefill.prompt_tokens_before(num_tokens + 1) == num_tokens, "a long request must not overtake another"
    await world.leave(serving, first)  # type: ignore[arg-type]


async def test_a_whole_life(world: World) -> None:
    """P sends token one, hands over and is lost; D repeats token one, sends the rest out of order, and finishes."""
    serving, first, rid = await world.begin()
    world.outputs("to-prefill-0", token(rid, 0, 50))
    assert (await first).token_id == 50
    world.outputs("to-prefill-0", ended=LegEnd(rid, 0))
    assert world.instances[0].num_outstanding == 0
    assert world.instances[2].num_outstanding == 1
    world.router.on_lost(world.instances[0], "gone")
    world.outputs("to-decode-0", token(rid, 2), token(rid, 0, 50), token(rid, 1))
    world.outputs("to-decode-0", token(rid, 3, finish="length"))
    assert await rest_of(serving) == [1, 2, 3]
    assert world.aborted() == []


@pytest.mark.parametrize("conn", ["to-prefill-0", "to-decode-0"])
async def test_an_error_of_a_leg_ends_the_request_and_names_the_instance(world: World, conn: str) -> None:
    serving, first, rid = await world.begin()
    world.outputs("to-prefill-0", token(rid, 0))
    world.outputs(conn, ended=LegEnd(rid, 0, "out of luck"))
    assert (await first).position == 0
    with pytest.raises(GenerationError, match=f"^{conn[3:]}: out of luck$"):
        await anext(serving)
    other = {"to-prefill-0": "to-decode-0", "to-decode-0": "to-prefill-0"}[conn]
    assert world.aborted() == [other]


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_closing_aborts_both_legs(world: World, num_tokens: int) -> None:
    serving, first, rid = await world.begin()
    if num_tokens:
        world.outputs("to-prefill-0", token(rid, 0))
        await first
    await world.leave(serving, first)
    assert world.aborted() == ["to-decode-0", "to-prefill-0"]
    assert {body.request_id for _, body in world.mailbox.of(wire.Abort)} == {rid}
    world.outputs("to-decode-0", token(rid, 1), ended=LegEnd(rid, 0, "late"))
    world.router.on_lost(world.instances[2], "late")


async def test_the_deadline() -> None:
    world = World(request_timeout_s=0.1)
    serving, first, rid = await world.begin()
    (left_s,) = {body.deadline_s for _, body in world.mailbox.of(wire.Submit)}
    assert 0 < left_s <= 0.1
    world.outputs("to-prefill-0", token(rid, 0))
    assert (await first).position == 0
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.1 s"):
        await anext(serving)
    assert world.aborted() == ["to-decode-0", "to-prefill-0"]
    world.assert_home()


@pytest.fixture
def three_unread(monkeypatch: pytest.MonkeyPatch) -> World:
    """Returns a world in which at most three tokens may be unread."""
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", 3)
    monkeypatch.setattr(stream_module, "MAX_UNREAD_STEPS", 3)
    return World()


async def test_a_reader_that_does_not_read_is_given_up(three_unread: World) -> None:
    """With too many unread tokens its legs end; the unread tokens can still be read, then the reason for the end."""
    world = three_unread
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
    with pytest.raises(GenerationError, match="has more than 3 unread tokens"):
        await anext(serving)
    world.outputs("to-prefill-0", token(other, 0, finish="length"))
    assert (await other_first).position == 0


async def test_an_answer_that_comes_at_once_is_not_unread(three_unread: World) -> None:
    """A beam search's answer, and any answer's last tokens, do not count as unread."""
    for sampling in (Sampling(max_tokens=9, beam_width=2), Sampling(max_tokens=4)):
        serving, first, rid = await three_unread.begin(sampling)
        conn = three_unread.mailbox.of(wire.Submit)[-2][0]
        last = sampling.max_tokens - 1
        three_unread.outputs(conn, *(token(rid, p, finish="length" if p == last else None) for p in range(last + 1)))
        assert (await first).position == 0
        assert await rest_of(serving) == list(range(1, last + 1))
    three_unread.assert_home()


async def test_mail_of_others_changes_nothing(world: World) -> None:
    """Tokens of another attempt, another instance or an unknown request are not delivered and end no leg."""
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
    await world.leave(serving)


async def test_random_lives_come_home() -> None:
    """After many concurrent requests with random ends, counts are zero and every sequence is a gapless prefix."""

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

    world, rng = World(), random.Random(3)
    await asyncio.gather(*(one(world, random.Random(rng.random())) for _ in range(200)))
    world.assert_home()
