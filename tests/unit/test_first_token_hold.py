"""A first token is held until decode has taken its sequence over: how long, and what ends the wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

import pytest

from pd_cluster import wire
from pd_cluster.cluster.routing import first_token_hold
from pd_cluster.cluster.routing.first_token_hold import MOST_HELD_S, MOST_STEPS, hold_s
from pd_cluster.types import LegEnd, Sampling, TokenOutput
from tests.support.router_world import SAMPLING, World, rest_of, token

STEP_S = 0.02


class Begun(NamedTuple):
    world: World
    serving: AsyncGenerator[TokenOutput, None]
    first: asyncio.Task[TokenOutput]
    rid: str

    async def comes(self) -> bool:
        """Whether the first token has arrived once all ready tasks have run."""
        for _ in range(5):
            await asyncio.sleep(0)
        return self.first.done()

    async def end(self) -> None:
        self.first.cancel()
        await asyncio.gather(self.first, return_exceptions=True)
        await self.serving.aclose()
        self.world.assert_home()


@pytest.fixture(autouse=True)
def hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all holds hours long, so that none expires unless a test wants it."""
    monkeypatch.setattr(first_token_hold, "MOST_HELD_S", 3600.0)


async def begun(sampling: Sampling = SAMPLING, step_s: float = 3600.0, is_on: bool = True) -> Begun:
    """Begins a request whose decode instance runs three other requests."""
    world = World(holds_first=is_on)
    for decode in world.instances[2:]:
        decode.load = wire.Load(num_running=3, tokens_per_step=4.0).at_rates(decode_step_s=step_s)
    return Begun(world, *await world.begin(sampling))


async def test_it_waits_until_decode_reports_it() -> None:
    it = await begun()
    it.world.outputs("to-prefill-0", token(it.rid, 0, 50))
    assert not await it.comes()
    it.world.outputs("to-prefill-0", ended=LegEnd(it.rid, 0))  # prefill has handed the request over
    assert not await it.comes()
    it.world.outputs("to-decode-0", token(it.rid, 0, 50))
    assert (await it.first).token_id == 50
    it.world.outputs("to-decode-0", token(it.rid, 1), token(it.rid, 2), token(it.rid, 3, finish="length"))
    assert await rest_of(it.serving) == [1, 2, 3]
    it.world.assert_home()


async def test_decode_may_be_first() -> None:
    it = await begun()
    it.world.outputs("to-decode-0", token(it.rid, 0, 50))
    it.world.outputs("to-prefill-0", token(it.rid, 0, 50))
    assert (await it.first).token_id == 50
    it.world.outputs("to-decode-0", token(it.rid, 1, finish="stop"))
    assert await rest_of(it.serving) == [1]
    it.world.assert_home()


@pytest.mark.parametrize(("step_s", "most_s"), [(STEP_S, MOST_STEPS * STEP_S), (5.0, 0.1)])
async def test_it_waits_no_longer_than_a_step_and_a_half_or_a_tenth_of_a_second(
    step_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_token_hold, "MOST_HELD_S", MOST_HELD_S)
    it = await begun(step_s=step_s)
    stream = it.world.router.streams.find(it.rid)
    assert hold_s(stream, "to-prefill-0", token(it.rid, 0)) == pytest.approx(most_s)
    assert hold_s(stream, "to-decode-0", token(it.rid, 0)) == 0
    it.world.outputs("to-prefill-0", token(it.rid, 0, 50))
    assert (await it.first).token_id == 50  # before any message from decode
    await it.end()


@pytest.mark.parametrize("why", ["off", "decode is idle", "nobody knows its steps", "it ends here", "read as a whole"])
async def test_it_does_not_wait(why: str) -> None:
    it = await begun(step_s=0.0 if why == "nobody knows its steps" else 3600.0, is_on=why != "off")
    if why == "decode is idle":
        it.world.instances[2].load = wire.Load().at_rates(decode_step_s=3600.0)
    if why == "read as a whole":
        await it.end()
        serving, first, rid = await it.world.begin(gathers=True)
        stream = it.world.router.streams.find(rid)
        assert hold_s(stream, "to-prefill-0", token(rid, 0)) == 0
        it = Begun(it.world, serving, first, rid)
    else:
        finish = "stop" if why == "it ends here" else None
        it.world.outputs("to-prefill-0", token(it.rid, 0, 50, finish))
        assert (await it.first).token_id == 50
    await it.end()


@pytest.mark.parametrize("loss", ["decode", "its leg"])
async def test_a_failed_attempt_keeps_it(loss: str) -> None:
    """The client gets the held token at once, and the next attempt continues after it."""
    it = await begun()
    it.world.outputs("to-prefill-0", token(it.rid, 0, 50))
    if loss == "decode":
        it.world.lose("decode-0")
    else:
        it.world.outputs("to-decode-0", ended=LegEnd(it.rid, 0, "a transfer failed", is_fault=True))
    assert (await it.first).token_id == 50
    rest = asyncio.ensure_future(rest_of(it.serving))
    while (conn_submit := it.world.mailbox.of(wire.Submit)[-1])[1].attempt == 0:
        await asyncio.sleep(0)
    conn, submit = conn_submit
    assert [each.output_token_ids for each in submit.resumed] == [[50]]
    it.world.outputs(conn, token(it.rid, 1, finish="stop", attempt=1))
    assert await rest == [1]
    it.world.assert_home()


async def test_several_sequences_wait_together() -> None:
    it = await begun(Sampling(max_tokens=4, n=2))
    firsts = [token(it.rid, 0, 50 + index, index=index) for index in range(2)]
    it.world.outputs("to-prefill-0", *firsts)
    assert not await it.comes()
    it.world.outputs("to-decode-0", *firsts)
    assert (await it.first).token_id == 50
    assert (await anext(it.serving)).token_id == 51
    await it.end()


@pytest.mark.parametrize("how", ["leaves", "stops"])
async def test_who_leaves_meanwhile_leaves_nothing(how: str) -> None:
    it = await begun()
    it.world.outputs("to-prefill-0", token(it.rid, 0, 50))
    stream = it.world.router.streams.find(it.rid)
    assert stream.held is not None
    timer = stream.held
    if how == "stops":
        stream.stop(0)
        with pytest.raises(StopAsyncIteration):
            await it.first
    await it.end()
    assert timer.cancelled()
    assert stream.held is None
