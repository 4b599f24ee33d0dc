"""A request that loses its instance or link continues elsewhere, with every token once and unchanged."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.placement.routing_rules import ReplayLimits
from pd_cluster.cluster.routing import replay_decision
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.errors import GenerationError, InstanceLost, Unavailable
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceState
from pd_cluster.types import LegEnd, Resumed, Sampling, TokenOutput
from tests.support.router_world import World, info_of, rest_of, token


async def next_attempt(world: World, attempt: int) -> dict[str, wire.Submit]:
    """Waits for this attempt's Submits; returns them by connection."""
    while not (submits := world.mailbox.of(wire.Submit)) or submits[-1][1].attempt < attempt:
        await asyncio.sleep(0)
    return {conn: submit for conn, submit in submits if submit.attempt == submits[-1][1].attempt}


async def begun_stream(world: World) -> tuple[asyncio.Task[list[int]], str]:
    """Begins a request and delivers its first token; returns a task for the remaining positions, and the id."""
    serving, first, rid = await world.begin()
    world.outputs("to-prefill-0", token(rid, 0, 5), ended=LegEnd(rid, 0))
    assert (await first).position == 0
    return asyncio.ensure_future(rest_of(serving)), rid


async def turns(num: int = 10) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("lost", ["prefill-0", "decode-0"])
async def test_before_the_first_token_another_pair_begins_anew(world: World, lost: str) -> None:
    serving, first, rid = await world.begin()
    world.lose(lost)
    submits = await next_attempt(world, 1)
    assert f"to-{lost}" not in submits
    assert {submit.leg for submit in submits.values()} == {"prefill", "decode"}
    assert all(not submit.resumed and submit.transfer_id.endswith("-1") for submit in submits.values())
    world.outputs("to-decode-0", token(rid, 0, 99))  # from the previous attempt
    for conn, submit in submits.items():
        if submit.leg == "prefill":
            world.outputs(conn, token(rid, 0, 5, attempt=1), ended=LegEnd(rid, 1))
        else:
            decode = conn
    world.outputs(decode, token(rid, 0, 5, attempt=1), token(rid, 1, 6, "length", attempt=1))
    assert (await first).token_id == 5
    assert await rest_of(serving) == [1]
    world.assert_home()


async def test_it_goes_on_at_a_mate_of_the_dead_only_if_nobody_else_is_left(world: World) -> None:
    """Members of a unit end together, so a surviving member will end soon and is the last choice."""
    for rank, instance in enumerate(world.instances[2:]):
        instance.info = info_of(instance.name, "decode", unit="decode-0..1", unit_rank=rank, unit_size=2)
    serving, first, _ = await world.begin()
    begun = await next_attempt(world, 0)
    lost, mate = ("decode-0", "decode-1") if "to-decode-0" in begun else ("decode-1", "decode-0")
    world.lose(lost)
    (conn,) = await next_attempt(world, 1)
    assert conn in ("to-prefill-0", "to-prefill-1")
    for name in sorted(("prefill-0", "prefill-1"), key=lambda name: conn.endswith(name)):
        world.lose(name)
    assert list(await next_attempt(world, 2)) == [f"to-{mate}"]
    await world.leave(serving, first)


async def test_of_several_sequences_those_that_have_not_ended_go_on(world: World) -> None:
    """Sequence 0 has ended, 1 was stopped, 2 is running, and 3's end has arrived before its earlier tokens."""
    handle: list[RequestStream] = []
    serving, first, rid = await world.begin(Sampling(n=4, max_tokens=4), routed=handle.append)
    firsts = [token(rid, 0, 10 + i, "stop" if i == 0 else None, index=i) for i in range(4)]
    world.outputs("to-prefill-0", *firsts, ended=LegEnd(rid, 0))
    assert (await first).index == 0
    for _ in range(3):
        await anext(serving)
    handle[0].stop(1)
    world.outputs("to-decode-0", token(rid, 1, 22, index=2), token(rid, 2, 33, "stop", index=3))
    assert (await anext(serving)).token_id == 22
    rest = asyncio.ensure_future(rest_of(serving))
    world.lose("decode-0")
    (submit,) = (await next_attempt(world, 1)).values()
    assert submit.resumed == [Resumed(2, [12, 22]), Resumed(3, [13])]
    more = [token(rid, 2, 1, "stop", 1, index=2), token(rid, 1, 2, None, 1, index=3)]
    world.outputs("to-decode-1", *more, token(rid, 2, 33, "stop", 1, index=3))
    assert await rest == [2, 1, 2]
    world.assert_home()


async def test_how_many_deaths_a_request_may_meet() -> None:
    """A request fails after two successive deaths, which it may have caused, or after three simultaneous ones."""
    for most, together_s in ((2, -1.0), (3, 60.0)):
        world = World(replay=ReplayLimits(together_s=together_s))
        serving, first, _ = await world.begin()
        for attempt in range(most):
            *_, conn = await next_attempt(world, attempt)
            world.lose(conn.removeprefix("to-"))
        with pytest.raises(InstanceLost, match=rf"was lost .* {most} instances have died"):
            await first
        await world.leave(serving)


@pytest.mark.parametrize("is_same_life", [True, False], ids=["it had paused", "it had died"])
async def test_losses_after_which_the_same_life_is_back_never_count(is_same_life: bool) -> None:
    """Pauses of the scheduler or of workers never count, however many; deaths always do."""
    limits = ReplayLimits(max_attempts=3, together_s=-1.0)
    world = World(replay=limits)
    serving, first, rid = await world.begin()
    for attempt in range(12):
        *_, conn = await next_attempt(world, attempt)
        name = conn.removeprefix("to-")
        for each in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            if each == name or is_same_life:  # a paused process loses all connections
                world.lose(each)
                world.come_back(each, epoch=0 if is_same_life else attempt + 1)
        if attempt and not is_same_life:
            with pytest.raises(InstanceLost, match="2 instances have died"):
                await first
            break
    else:
        conn = next(iter(await next_attempt(world, 12)))
        world.outputs(conn, token(rid, 0, 9, "length", attempt=12), ended=LegEnd(rid, 12))
        assert (await first).token_id == 9
    await world.leave(serving)


async def test_a_server_that_stops_ends_what_waits_for_an_instance() -> None:
    """A stopping server ends waiting requests at once with an error, even if their deadlines are later."""
    world = World(replay=ReplayLimits(wait_s=1000.0, together_s=1000.0))
    rest, _ = await begun_stream(world)
    for instance in world.instances:
        world.lose(instance.name)
    late = asyncio.ensure_future(anext(world.serve()))
    await turns()
    assert not rest.done()
    assert not late.done()
    world.router.end_all()
    with pytest.raises(GenerationError, match="the server is shutting down; decode-0 was lost"):
        await rest
    with pytest.raises(Unavailable, match="the server is shutting down"):
        await late
    world.assert_home()


async def test_what_was_begun_is_finished_by_the_same_numerics() -> None:
    """With two pairs of different numerics, after the first token only instances of the same numerics may continue."""
    world = World(replay=ReplayLimits(wait_s=0.05))
    for instance in world.instances:
        dtype = "float32" if instance.name.endswith("0") else "bfloat16"
        instance.info = info_of(instance.name, instance.role, numerics=Numerics(dtype=dtype))
    rest, _ = await begun_stream(world)
    world.lose("decode-0")
    assert list(await next_attempt(world, 1)) == ["to-prefill-0"]
    world.lose("prefill-0")
    with pytest.raises(InstanceLost, match="prefill-0 was lost"):
        await rest
    world.assert_home()


async def test_after_two_deaths_it_goes_only_where_somebody_has_been_heard_of() -> None:
    """If all die at once but are noticed one by one, the third attempt waits for an instance heard from since."""
    world = World(replay=ReplayLimits(together_s=60.0))
    for instance in world.instances:
        instance.heard_s = asyncio.get_running_loop().time()
    serving, first, rid = await world.begin()
    world.lose("prefill-0")
    await next_attempt(world, 1)
    world.lose("prefill-1")
    num_submits = len(world.mailbox.of(wire.Submit))
    await turns(20)
    assert len(world.mailbox.of(wire.Submit)) == num_submits, "the decode instances may be dead, too"
    world.instances[-1].heard_s = asyncio.get_running_loop().time() + 1
    world.membership.changed.set()
    assert list(await next_attempt(world, 2)) == ["to-decode-1"]
    world.outputs("to-decode-1", token(rid, 0, 4, "length", attempt=2), ended=LegEnd(rid, 2))
    assert (await first).token_id == 4
    await world.leave(serving)


async def test_both_instances_of_a_request_die_at_once(world: World) -> None:
    """Two deaths cost one attempt, or two if the second is noticed only after the request was sent there."""
    rest, rid = await begun_stream(world)
    world.lose("decode-0")
    assert list(await next_attempt(world, 1)) == ["to-decode-1"]
    world.lose("prefill-0")
    world.lose("decode-1")
    ((conn, submit),) = (await next_attempt(world, 2)).items()
    assert (conn, submit.resumed) == ("to-prefill-1", [Resumed(0, [5])])
    world.outputs(conn, token(rid, 1, 6, "length", attempt=2))
    assert await rest == [1]
    world.assert_home()


async def test_how_often_it_is_tried_again() -> None:
    for max_attempts in (0, 2):
        world = World(replay=ReplayLimits(max_attempts=max_attempts))
        serving, first, rid = await world.begin()
        for attempt in range(max_attempts + 1):
            conn, *others = await next_attempt(world, attempt)
            assert not first.done()
            assert attempt != 1 or {conn, *others} != {"to-prefill-0", "to-decode-0"}, "expected another pair"
            world.outputs(conn, ended=LegEnd(rid, attempt, "the link is down", is_fault=True))
        with pytest.raises(GenerationError, match="the link is down"):
            await first
        assert world.mailbox.of(wire.Submit)[-1][1].attempt == max_attempts
        await world.leave(serving)


async def test_it_waits_for_somebody_to_come_back_and_not_for_ever() -> None:
    for wait_s in (60.0, 0.01):
        world = World(replay=ReplayLimits(wait_s=wait_s))
        serving, first, rid = await world.begin()
        for instance in world.instances[1:]:
            instance.state = "unreachable"
        world.lose("prefill-0")
        if wait_s < 1:
            with pytest.raises(GenerationError, match="prefill-0 was lost"):
                await first
        else:
            await turns()
            assert not first.done()
            world.instances[1].state = "ready"
            world.membership.changed.set()
            ((conn, submit),) = (await next_attempt(world, 1)).items()
            assert (conn, submit.leg) == ("to-prefill-1", "hybrid")
            world.outputs(conn, token(rid, 0, 3, "length", attempt=1))
            assert (await first).token_id == 3
        await world.leave(serving)


async def test_a_new_request_waits_a_moment_when_everybody_was_lost_just_now() -> None:
    """It waits, as after a pause of the scheduler; without a recent loss it does not."""
    for together_s, is_served in ((60.0, True), (0.01, False)):
        world = World(replay=ReplayLimits(together_s=together_s))
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            world.lose(name)
        first = asyncio.ensure_future(anext(world.serve()))
        if not is_served:
            with pytest.raises(Unavailable, match="no prefill and no decode instance is ready"):
                await first
            continue
        await turns()
        assert not first.done()
        for instance in world.instances:
            instance.state = "ready"
        world.membership.changed.set()
        await next_attempt(world, 0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    world = World()
    for instance in world.instances:
        instance.state = "unreachable"
    with pytest.raises(Unavailable):
        await anext(world.serve())


async def test_a_new_request_waits_longer_for_an_instance_that_returns() -> None:
    """On a busy host, workers that disconnected from a paused scheduler may take seconds to reconnect."""
    states: list[tuple[InstanceState, str]] = [
        *(("loading", ""), ("unreachable", wire.GIVEN_UP), ("unreachable", wire.PAUSED)),
    ]
    for returning in states:
        world = World(replay=ReplayLimits(together_s=0.01, wait_s=60.0))
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            world.lose(name)
        back = world.instances[2]
        back.state, back.reason = returning
        first = asyncio.ensure_future(anext(world.serve()))
        await asyncio.wait([first], timeout=0.1)
        assert not first.done()
        back.state = "ready"
        world.membership.changed.set()
        await next_attempt(world, 0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


# ---- a simulated cluster


def made_up(index: int, position: int) -> int:
    return 1000 * index + position


class Workers:
    """Each leg generates tokens from sequence and position, in random portions, until it dies."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.seen = 0
        self.legs: dict[tuple[str, int], tuple[str, wire.Submit, dict[int, int]]] = {}
        self.untold: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)  # held for gathering readers

    def look(self) -> None:
        for conn, body in self.world.mailbox.sent[self.seen :]:
            if isinstance(body, wire.Submit):
                known = {each.index: len(each.output_token_ids) for each in body.resumed}
                positions = known or dict.fromkeys(range(body.order.sampling.n), 0)
                for each in body.resumed:
                    expected = [made_up(each.index, p) for p in range(len(each.output_token_ids))]
                    assert each.output_token_ids == expected
                self.legs[conn, body.attempt] = conn, body, positions
            elif isinstance(body, wire.Abort) and body.index == -1:
                self.legs.pop((conn, body.attempt), None)
        self.seen = len(self.world.mailbox.sent)

    def step(self) -> None:
        self.look()
        if not self.legs:
            return
        key = self.rng.choice(sorted(self.legs))
        conn, submit, positions = self.legs[key]
        tokens: list[TokenOutput] = []
        for index in sorted(positions):
            if submit.leg == "prefill" or self.rng.random() < 0.7:
                position = positions[index]
                last = position + 1 >= submit.order.sampling.max_tokens
                finish: Any = "length" if last else None
                token_id = made_up(index, position)
                own = token(submit.request_id, position, token_id, finish, submit.attempt, index)
                untold = self.untold[conn, submit.attempt, index]
                if submit.order.gathers and position and not last and self.rng.random() < 0.7:
                    untold.append(token_id)
                else:
                    tokens.append(msgspec.structs.replace(own, earlier=tuple(untold)))
                    untold.clear()
                positions[index] += 1
        self.legs[key] = conn, submit, {i: p for i, p in positions.items() if p < submit.order.sampling.max_tokens}
        ended = LegEnd(submit.request_id, submit.attempt) if submit.leg == "prefill" else None
        if submit.leg == "prefill" or not self.legs[key][2]:
            del self.legs[key]
        self.world.outputs(conn, *tokens, ended=ended)

    def fault(self) -> None:
        """Kills and restarts a process, or breaks a link."""
        self.look()
        name = self.rng.choice(["prefill-0", "prefill-1", "decode-0", "decode-1"])
        if self.rng.random() < 0.5:
            self.legs = {key: leg for key, leg in self.legs.items() if leg[0] != f"to-{name}"}
            self.world.lose(name)
            next(i for i in self.world.instances if i.name == name).state = "ready"
        elif self.legs:
            key = self.rng.choice(sorted(self.legs))
            conn, submit, _ = self.legs.pop(key)
            self.world.outputs(conn, ended=LegEnd(submit.request_id, submit.attempt, "the link is down", is_fault=True))


@pytest.mark.parametrize("seed", range(30))
async def test_random_faults_change_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_decision, "MAX_DEATHS", 1000)
    monkeypatch.setattr(replay_decision, "MAX_DEATHS_TOGETHER", 1000)
    world = World(replay=ReplayLimits(max_attempts=1000))
    workers = Workers(world, seed)
    rng = workers.rng
    sampling = Sampling(n=rng.randrange(1, 4), max_tokens=rng.randrange(1, 9))
    gathers = rng.random() < 0.5
    got: defaultdict[int, list[int]] = defaultdict(list)

    async def read() -> None:
        async for item in world.serve(sampling, gathers=gathers):
            for each in item.apart():
                assert each.position == len(got[each.index])
                got[each.index].append(each.token_id)

    reading = asyncio.ensure_future(read())
    num_faults = rng.randrange(6)
    while not reading.done():
        await asyncio.sleep(0)
        if num_faults and rng.random() < 0.2:
            num_faults -= 1
            workers.fault()
        else:
            workers.step()
    reading.result()
    expected = [made_up(0, p) for p in range(sampling.max_tokens)]
    assert got[0] == expected
    assert {i: len(ids) for i, ids in got.items()} == dict.fromkeys(range(sampling.n), sampling.max_tokens)
    world.assert_home()
