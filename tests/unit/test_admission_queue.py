"""Requests wait for capacity up to their limit, and are refused early if they would wait longer."""

from __future__ import annotations

import asyncio
import math

import pytest

from pd_cluster import wire
from pd_cluster.cluster.placement.spare_capacity import spare_capacity
from pd_cluster.cluster.routing.admission_queue import (
    MAX_WAITING_TOKENS,
    MEASURED_S,
    SAFE,
    AdmissionRate,
    QueuedRequest,
)
from pd_cluster.cluster.streams.request_origin import PromptGroup
from pd_cluster.errors import GenerationError, Overloaded
from tests.support.hall import FULL, Hall, fill, pair
from tests.support.router_world import info_of, ready

# ---- capacity


def test_prompts_that_take_long_to_begin_wait() -> None:
    """Prompts wait if no instance of the role has capacity; an instance always gets one prompt and the next one."""
    instances = pair()
    assert spare_capacity(instances)[:3] == (True, True, True)
    fill(instances[0], FULL - 1)
    assert spare_capacity(instances).for_prompts
    fill(instances[0])
    assert not spare_capacity(instances).for_prompts
    other = ready("prefill-1")
    other.load = instances[0].load
    assert spare_capacity([*instances, other]).for_prompts
    fill(instances[0], 10 * FULL)
    instances[0].num_outstanding = 1
    assert spare_capacity(instances).for_prompts


def test_short_requests_do_not_wait_for_a_long_prompt_that_gives_way_to_them() -> None:
    """Only long prompts wait for an instance that is busy with a long prompt, unless its short ones fill it, too."""
    instances = pair()
    prefill = instances[0]
    prefill.info = info_of("prefill-0", "prefill", max_num_batched_tokens=512)
    prefill.outstanding_tokens, prefill.num_outstanding = 1_000_000, 3
    assert not spare_capacity(instances).for_prompts
    prefill.num_long, prefill.long_tokens = 1, 1_000_000 - FULL // 2
    room = spare_capacity(instances)
    assert (room.for_prompts, room.longest) == (True, prefill.long_from) == (True, 4096)
    prefill.num_outstanding, prefill.outstanding_tokens = 5, FULL + prefill.long_tokens
    assert not spare_capacity(instances).for_prompts, "its short prompts alone take too long"


def test_an_instance_that_has_told_no_rate_gets_some_prompts() -> None:
    instances = pair()
    instances[0].load = instances[0].load.at_rates()
    instances[0].outstanding_tokens, instances[0].num_outstanding = 100_000, 3
    assert spare_capacity(instances).for_prompts
    instances[0].num_outstanding = 100
    assert not spare_capacity(instances).for_prompts


@pytest.mark.parametrize(
    ("num_places", "decode", "room"),
    [
        (8, {"num_running": 6}, (True, True, True)),
        (8, {"num_running": 7}, (True, True, False)),
        (8, {"num_running": 8, "num_landing": 2}, (True, False, False)),
        (256, {"num_running": 4, "num_waiting": 3}, (True, False, True)),
        (256, {"num_blocks": 100, "num_held_blocks": 90}, (True, True, False)),
        # Sequences that wait for their prompt take a place, but do not show that the instance is full.
        (256, {"num_waiting": 40, "num_expected": 40}, (True, True, True)),
        (256, {"num_waiting": 43, "num_expected": 40}, (True, False, True)),
        (32, {"num_waiting": 40, "num_expected": 40}, (True, False, False)),
    ],
)
def test_sequences_need_places_and_memory(num_places: int, decode: dict[str, int], room: tuple[bool, ...]) -> None:
    assert spare_capacity(pair(num_places, **decode))[:3] == room


def test_what_was_sent_and_what_has_ended_since_the_heartbeat_count() -> None:
    instances = pair(8, num_running=5)
    instances[1].num_reported_sequences, instances[1].num_sequences = 5, 10
    assert not spare_capacity(instances).for_sequences
    instances = pair(8, num_running=8, num_waiting=4)
    assert not spare_capacity(instances).for_sequences
    instances[1].num_reported_sequences, instances[1].num_sequences = 12, 7
    assert spare_capacity(instances).for_sequences


def test_instances_of_one_kind_or_none() -> None:
    """A hybrid needs capacity for both phases; without any instance that takes requests, nothing waits."""
    instances = pair(8, num_running=2)
    assert spare_capacity(instances[1:])[:3] == (True, True, True)
    instances[1].load = wire.Load(num_running=8, num_waiting=4)
    assert not spare_capacity(instances[1:]).for_sequences
    for instance in instances:
        instance.state = "unreachable"
    assert spare_capacity(instances)[:3] == (True, True, True)


# ---- which requests wait, and how long


async def test_who_waits_begins_as_soon_as_there_is_room() -> None:
    hall = Hall()
    await hall.visit()
    assert hall.room.num_waiting == 0
    hall.close()
    first, second = await hall.waiting(2)
    assert not first.done()
    hall.open()
    await asyncio.gather(first, second)
    hall.close()
    (third,) = await hall.waiting(1)
    fill(hall.instances[0], 0)
    hall.heard.set()  # a heartbeat without ended requests
    await third


async def test_room_for_one_is_not_given_to_two() -> None:
    hall = Hall()
    hall.close()
    first, second = (asyncio.ensure_future(hall.room.turn(QueuedRequest("a", 10, 1))) for _ in range(2))
    while hall.room.num_waiting < 2:
        await asyncio.sleep(0)
    hall.open()
    entry = await first
    hall.open()
    await asyncio.sleep(0)
    assert not second.done()
    hall.close()  # the request that was first before
    hall.room.begun(entry)
    await asyncio.sleep(0)
    assert not second.done()
    hall.open()
    await second


async def test_nobody_waits_longer_than_he_may() -> None:
    hall = Hall(max_wait_s=0.01)
    hall.close()
    with pytest.raises(Overloaded, match=r"the request has waited for the 0\.01 s of --max-queue-time"):
        await hall.visit()
    with pytest.raises(Overloaded, match=r"waited for the 0\.005 s of the client's own timeout"):
        await hall.visit(client_timeout_s=0.005)
    assert hall.room.num_waiting == 0
    hall = Hall(max_wait_s=100.0)
    hall.close()
    with pytest.raises(Overloaded, match="has waited for the 100 s"):  # its earlier wait counts
        await hall.visit(since_s=asyncio.get_running_loop().time() - 100)


async def test_who_leaves_takes_no_turn() -> None:
    hall = Hall()
    hall.close()
    first, second, third = await hall.waiting(3)
    first.cancel()
    hall.open()
    second.cancel()  # exactly when its turn comes
    await third
    assert hall.room.num_waiting == 0
    assert hall.room.queue.clients["a"].num_begun == 1


async def test_what_would_wait_too_long_is_refused_at_once_and_told_when_to_come_back() -> None:
    hall = Hall(max_wait_s=10.0)
    hall.close()
    tasks = await hall.waiting(15, num_tokens=100)
    hall.measured(100)
    with pytest.raises(Overloaded, match=r"the expected wait of 15 s is too long for the 10 s of --max-") as told:
        hall.room.arrives("a", 10)
    assert told.value.retry_after_s == math.ceil(15 - SAFE * 10)
    with pytest.raises(Overloaded, match="expected wait"):
        await hall.visit()
    hall.room.departs(hall.room.arrives("another", 10), 10)  # this request is next
    for task in tasks[: told.value.retry_after_s]:  # as many as end within that time
        task.cancel()
    while hall.room.num_waiting > 15 - told.value.retry_after_s:
        await asyncio.sleep(0)
    hall.room.departs(hall.room.arrives("a", 10), 10)
    with pytest.raises(Overloaded, match="s is too long for the 3 s of the client's own"):
        hall.room.arrives("a", 10, client_timeout_s=3.0)
    hall.open()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_arrives_at_the_same_time_is_counted_before_it_is_read() -> None:
    hall = Hall(max_wait_s=10.0)
    hall.close()
    tasks = await hall.waiting(1, num_tokens=100)
    hall.measured(100)
    for _ in range(7):
        hall.room.arrives("a", 100)
    with pytest.raises(Overloaded):
        hall.room.arrives("a", 100)
    hall.open()
    await asyncio.gather(*tasks)


def test_a_pause_does_not_make_what_follows_look_slow() -> None:
    pace = AdmissionRate(0.0)
    pace.passed(3 * MEASURED_S, waited=True)
    for at in range(10):  # 3,000 tokens/s after a slow start
        pace.passed(3 * MEASURED_S + 0.1 * at, waited=True)
        pace.began(300)
    assert 2500 < pace.tokens_per_s < 4500


async def test_without_a_limit_only_a_full_room_refuses_those_that_have_many_there() -> None:
    hall = Hall()
    hall.close()
    tasks = await hall.waiting(4, "hog", MAX_WAITING_TOKENS // 4)
    hall.measured(1)
    with pytest.raises(Overloaded, match="4 requests are already waiting"):
        await hall.visit("hog")
    tasks += await hall.waiting(1, "guest")
    hall.open()
    await asyncio.gather(*tasks)


async def test_the_last_places_are_for_who_has_few() -> None:
    alone = Hall()
    await alone.visit("only")
    alone.instances[1].load = wire.Load(num_running=7)
    await alone.visit("only")
    hall = Hall()
    await hall.visit("guest")
    hall.room.begun(await hall.room.turn(QueuedRequest("hog", 10, 4)))
    hall.instances[1].load = wire.Load(num_running=7)
    (hogs,) = await hall.waiting(1, "hog")
    for load in (wire.Load(num_running=7), wire.Load(num_running=12, num_waiting=4)):  # one place left, then none
        hall.instances[1].load = load
        await hall.visit("guest")
        assert not hogs.done()
    hall.instances[1].load = wire.Load(num_running=6)
    hall.room.look()
    await hogs


async def test_the_sequences_of_a_request_count_before_it_begins() -> None:
    """A request with many sequences gets no larger share of the last places than as many single requests."""
    hall = Hall()
    await hall.visit("guest")
    entry = await hall.room.turn(QueuedRequest("hog", 10, 3))
    hall.room.begun(entry)
    hall.instances[1].load = wire.Load(num_running=7)
    many = asyncio.ensure_future(hall.room.turn(QueuedRequest("guest", 10, 60)))
    while not hall.room.num_waiting:
        await asyncio.sleep(0)
    assert not many.done(), "61 sequences would be more than its share"
    few = await hall.room.turn(QueuedRequest("other", 10, 2))
    hall.room.begun(few)
    hall.instances[1].load = wire.Load(num_running=2)
    hall.room.look()
    hall.room.begun(await many)


async def test_all_that_wait_end_when_the_server_stops() -> None:
    hall = Hall()
    hall.close()
    tasks = await hall.waiting(3)
    hall.room.close(GenerationError("the server is shutting down"))
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(end) for end in ends] == ["the server is shutting down"] * 3
    assert hall.room.num_waiting == 0


async def test_prompts_of_one_request_are_let_in_together() -> None:
    """All prompts of a request are admitted once one is, because refusing some would waste the others' places."""
    hall, group = Hall(max_wait_s=1.0), PromptGroup()
    hall.close()
    tasks = await hall.waiting(1, num_tokens=1000, group=group)
    hall.measured(100)
    tasks += await hall.waiting(3, num_tokens=1000, group=group)
    with pytest.raises(Overloaded):
        await hall.visit(group=PromptGroup())
    hall.open()
    await asyncio.gather(*tasks)


async def test_when_the_first_prompt_of_a_request_has_begun_the_others_wait_longer() -> None:
    hall, group = Hall(max_wait_s=0.02), PromptGroup()
    await hall.visit(group=group)
    hall.close()
    (late,) = await hall.waiting(1, group=group)
    with pytest.raises(Overloaded, match="has waited"):
        await hall.visit(group=PromptGroup())
    await asyncio.sleep(0.02)  # longer than a single request may wait
    assert not late.done()
    hall.open()
    await late


async def test_where_there_are_priorities_nobody_is_refused_for_what_comes_after_him() -> None:
    hall = Hall(max_wait_s=1.0, has_priorities=True)
    hall.close()
    tasks = await hall.waiting(10, num_tokens=1000)
    hall.measured(10)
    tasks += await hall.waiting(1, priority=-1)
    hall.room.departs(hall.room.arrives("a", 10), 10)
    assert hall.room.queue.next(lambda entry: True).priority == -1  # type: ignore[union-attr]
    hall.open()
    await asyncio.gather(*tasks)


async def test_who_would_begin_at_once_is_not_refused_for_those_who_may_not() -> None:
    """The guest has used more tokens recently than the hog, but the hog's requests wait for places only it lacks."""
    hall = Hall(max_wait_s=1.0)
    hall.room.begun(await hall.room.turn(QueuedRequest("hog", 10, 4)))
    hall.room.ended(await hall.visit("guest", 10_000), 10_000)
    hall.instances[1].load = wire.Load(num_running=7)
    tasks = await hall.waiting(3, "hog", 1000)
    hall.measured(100)
    hall.room.departs(hall.room.arrives("guest", 10), 10)
    await hall.visit("guest")
    with pytest.raises(Overloaded):
        hall.room.arrives("hog", 10)
    hall.instances[1].load = wire.Load()
    hall.room.look()
    await asyncio.gather(*tasks)
