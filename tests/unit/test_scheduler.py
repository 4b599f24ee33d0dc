"""The step planner: budget, order, preemption; and random traffic in which everybody finishes and nothing leaks."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.errors import OutOfBlocks
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Order, Request, Sampling, Span, Status


def make(num_blocks: int = 32, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> StepScheduler:
    return StepScheduler(BlockPool(num_blocks), block_size, max_num_seqs, budget)


def request(name: str, prompt: int, arrival_s: float = 0.0, max_tokens: int = 8, priority: int = 0) -> Request:
    sampling = Sampling(max_tokens=max_tokens)
    return Request(name, Order([1] * prompt, sampling, priority=priority), arrival_s=arrival_s)


def step(scheduler: StepScheduler) -> StepPlan:
    """Plans and computes; every request that catches up gets a token, and ends at max_tokens."""
    plan = scheduler.plan()
    for ready in scheduler.computed(plan):
        ready.output_token_ids.append(7)
        if len(ready.output_token_ids) >= ready.sampling.max_tokens:
            scheduler.finish(ready)
    scheduler.check()
    return plan


def chunks(plan: StepPlan) -> dict[str, int]:
    return {r.request_id: n for r, n in plan.chunks}


def test_a_long_prompt_is_chunked_within_the_budget() -> None:
    scheduler = make()
    scheduler.add(request("a", 40))
    assert [chunks(step(scheduler)) for _ in range(4)] == [{"a": 16}, {"a": 16}, {"a": 8}, {"a": 1}]


def test_a_picture_stays_in_one_piece() -> None:
    """Chunks end before or behind it; one that does not fit beside others' tokens waits, and so do younger ones."""
    scheduler = StepScheduler(BlockPool(64), 4, 8, 16, keeps_pictures=True)
    spans = (Span(10, 22, b"1"), Span(22, 34, b"2"), Span(36, 39, b"3"))
    asked = request("a", 45)
    asked = Request("a", replace(asked.order, spans=spans), arrival_s=1.0)
    scheduler.add(asked)
    assert [chunks(step(scheduler)) for _ in range(4)] == [{"a": 10}, {"a": 12}, {"a": 14}, {"a": 9}]
    begun = Request("b", replace(asked.order, spans=(Span(2, 18, b"1"),)), arrival_s=2.0, num_computed_tokens=0)
    scheduler.add(begun)
    assert chunks(step(scheduler)) == {"a": 1, "b": 2}
    scheduler.add(request("c", 4, arrival_s=3.0))
    for _ in range(6):
        assert chunks(step(scheduler)) == {"a": 1}, "no room for 16 tokens, and nobody overtakes"
    found = [chunks(step(scheduler)) for _ in range(2)]
    assert found == [{"b": 16}, {"b": 16}]


def test_what_is_cached_may_end_inside_a_picture() -> None:
    """Its rest is computed in one piece, in a later step if there is no room for it."""
    scheduler = StepScheduler(BlockPool(64), 4, 20, 16, PrefixScope("model", Numerics()), keeps_pictures=True)
    order = replace(request("a", 23).order, spans=(Span(7, 23, b"1"),))
    scheduler.add(Request("first", order))
    assert [chunks(step(scheduler)) for _ in range(2)] == [{"first": 7}, {"first": 16}]
    scheduler.add(Request("again", order, arrival_s=1.0))
    assert chunks(step(scheduler)) == {"first": 1, "again": 3}  # 20 were cached
    others = [request(f"r{at}", 1, arrival_s=2.0 + at, max_tokens=3) for at in range(13)]
    for other in others:
        scheduler.add(other)
    assert len(chunks(step(scheduler))) == 15
    late = Request("late", order, arrival_s=20.0)
    scheduler.add(late)
    assert "late" not in chunks(step(scheduler)), "one token of the budget is left, and three of the picture"
    while late.num_computed_tokens <= 20:
        plan = step(scheduler)
    assert chunks(plan)["late"] == 3


def test_decodes_come_before_prompts() -> None:
    scheduler = make()
    scheduler.add(request("decoding", 4, arrival_s=5.0))
    step(scheduler)
    scheduler.add(request("prompt", 40, arrival_s=0.0))
    plan = step(scheduler)
    assert chunks(plan) == {"decoding": 1, "prompt": 15}


def test_prompts_are_admitted_in_order_and_never_overtaken() -> None:
    scheduler = make(num_blocks=12)
    scheduler.add(request("small", 4, arrival_s=2.0))
    scheduler.add(request("large", 44, arrival_s=1.0))
    assert chunks(step(scheduler)) == {"large": 16}  # 11 blocks; `small` waits although its block is free


def test_lower_priorities_come_first_and_keep_their_place() -> None:
    scheduler = make(num_blocks=12)
    first = request("first", 44, arrival_s=1.0)
    for each in (first, request("urgent", 44, arrival_s=2.0, priority=-1), request("late", 44, 0.0, priority=7)):
        scheduler.add(each)
    assert chunks(step(scheduler)) == {"urgent": 16}
    scheduler.finish(scheduler.requests["urgent#0"])
    assert chunks(step(scheduler)) == {"first": 16}
    scheduler.finish(first)
    assert chunks(step(scheduler)) == {"late": 16}


def test_the_number_of_sequences_is_bounded() -> None:
    scheduler = make(max_num_seqs=2)
    for at in range(4):
        scheduler.add(request(f"r{at}", 2, arrival_s=float(at)))
    assert list(chunks(step(scheduler))) == ["r0", "r1"]


def test_the_youngest_gives_way() -> None:
    scheduler = make(num_blocks=5, block_size=4)
    old, young = request("old", 7, 0.0, max_tokens=10), request("young", 4, 1.0, max_tokens=10)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(young)
    while young.status is not Status.WAITING or not young.output_token_ids:
        step(scheduler)
    assert old.status is Status.RUNNING
    assert young.block_table == []
    assert young.num_computed_tokens == 0
    assert young.output_token_ids, "what it generated stays"


def test_a_request_that_is_handed_over_is_never_preempted() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    local = request("local", 7, arrival_s=0.0)
    scheduler.add(local)
    step(scheduler)
    exported = request("exported", 4, arrival_s=1.0)
    exported.leg = "prefill"
    exported.block_table = scheduler.blocks.take(2)
    exported.status = Status.RUNNING
    exported.num_computed_tokens = 4
    scheduler.requests[exported.key] = exported
    scheduler.running.append(exported)
    exported.output_token_ids.append(7)
    scheduler.plan()
    assert exported.status is Status.RUNNING


def test_landing_takes_all_blocks_or_none() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    landing = request("landing", 8)
    scheduler.land(landing, 12)
    assert len(landing.block_table) == 3
    with pytest.raises(OutOfBlocks):
        scheduler.land(request("other", 8), 12)
    scheduler.check()
    scheduler.landed(landing)
    landing.output_token_ids.append(7)
    assert chunks(scheduler.plan()) == {"landing": 1}


def test_nothing_lands_while_a_request_waits() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    landing = request("landing", 8)
    assert scheduler.can_land(landing, 8)
    scheduler.add(request("waiting", 8))
    assert not scheduler.can_land(landing, 8)


def test_a_request_of_many_sequences_keeps_none_from_beginning() -> None:
    """An eighth of the places is for requests that begin, however many further sequences run and wait."""
    scheduler = make(num_blocks=400, block_size=4, max_num_seqs=16, budget=64)
    many = request("many", 4, max_tokens=50)
    scheduler.add(many)
    step(scheduler)
    further = [scheduler.fork(many, index) for index in range(1, 40)]
    assert sum(each.status is Status.RUNNING for each in further) == scheduler.num_seqs - 1 == 14
    lands = request("lands", 4, arrival_s=1.0)
    assert scheduler.can_land(lands, 8)
    scheduler.land(lands, 8)
    assert not scheduler.can_land(request("no place is left", 4, arrival_s=1.0), 8)
    scheduler.finish(lands)
    scheduler.add(computes := request("computes here", 4, arrival_s=1.0))
    scheduler.plan()
    assert computes.status is Status.RUNNING, "it is behind 25 sequences that wait for a place of theirs"
    assert scheduler.num_seqs == 16
    scheduler.finish(further[0])
    assert not scheduler.can_land(request("third", 4, arrival_s=1.0), 8), "those that begin have their eighth"
    step(scheduler)
    assert sum(each.status is Status.RUNNING for each in further) == 14, "the next further one has the free place"
    scheduler.check()


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic(seed: int) -> None:
    """Requests, landings and aborts in a small pool: the oldest always gets on, all end, every block comes home."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 7])
    longest = 30
    num_blocks = -(-longest // block_size) + rng.randrange(0, 6)
    scheduler = make(num_blocks, block_size, max_num_seqs=rng.randrange(1, 6), budget=rng.randrange(1, 20))
    num_left, landing, now_s = 40, [], 0.0
    for _ in range(6000):
        now_s += 1.0
        if num_left and rng.random() < 0.4:
            num_left -= 1
            prompt = rng.randrange(1, longest - 1)
            new = request(f"r{num_left}", prompt, now_s, rng.randrange(1, longest - prompt + 1))
            if rng.random() < 0.5:
                scheduler.add(new)
            elif scheduler.can_land(new, prompt + 1):
                scheduler.land(new, prompt + 1)
                landing.append(new)
        if landing and rng.random() < 0.5:
            landed = landing.pop(rng.randrange(len(landing)))
            if rng.random() < 0.2:
                scheduler.finish(landed)
            else:
                landed.output_token_ids.append(7)
                scheduler.landed(landed)
                if len(landed.output_token_ids) >= landed.sampling.max_tokens:
                    scheduler.finish(landed)
        if scheduler.requests and rng.random() < 0.05:
            victim = rng.choice(list(scheduler.requests.values()))
            if victim.status is not Status.LANDING:
                scheduler.finish(victim)
        plan = step(scheduler)
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert len({r.key for r, _ in plan.chunks}) == len(plan.chunks)
        assert scheduler.num_seqs <= scheduler.max_num_seqs
        if not num_left and not scheduler.requests:
            break
    assert not scheduler.requests, "somebody starves"
    assert scheduler.blocks.num_free == num_blocks


@pytest.mark.parametrize(
    ("landed_as", "asked_as", "hits"), [("", "", 2), ("int8", "int8", 2), ("int8", "", 0), ("", "int8", 0)]
)
def test_kv_that_lost_precision_serves_only_its_like(landed_as: str, asked_as: str, hits: int) -> None:
    scheduler = StepScheduler(BlockPool(32), 4, 8, 16, PrefixScope("model", Numerics()))
    first, second = request("a", 9), request("b", 9)
    first.kv_precision, second.kv_precision = landed_as, asked_as
    assert scheduler.land(first, 9) == 0
    scheduler.landed(first)
    scheduler.finish(first)
    assert scheduler.land(second, 9) == hits * 4
    scheduler.finish(second)
    local = request("c", 10)  # computed here, so exact
    scheduler.add(local)
    scheduler.plan()
    assert local.num_cached_tokens == (0 if landed_as else 8)


def test_a_fork_of_kv_that_lost_precision_is_known_as_such() -> None:
    scheduler = StepScheduler(BlockPool(32), 4, 8, 16, PrefixScope("model", Numerics()))
    parent = request("a", 8)
    parent.kv_precision = "int8"
    scheduler.land(parent, 8)
    scheduler.landed(parent)
    assert scheduler.fork(parent, 1).kv_precision == "int8"
