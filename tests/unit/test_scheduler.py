"""Step planner rules that the reference lacks: pictures, places of many-sequence requests, precision."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.errors import OutOfBlocks
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request, RequestSpec, Sampling, Span, Status
from pd_cluster.types.request_spec import BATCH_PRIORITY


def make(num_blocks: int = 32, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> StepScheduler:
    return StepScheduler([LayerGroup(BlockPool(num_blocks))], StepSizes(block_size, max_num_seqs, budget))


def request(name: str, prompt: int, arrival_s: float = 0.0, max_tokens: int = 8) -> Request:
    return Request(name, RequestSpec([1] * prompt, Sampling(max_tokens=max_tokens)), arrival_s=arrival_s)


def step(scheduler: StepScheduler) -> StepPlan:
    """Plans and computes a step; each fully computed request gets a token, and ends at max_tokens."""
    plan = scheduler.plan()
    for ready in scheduler.computed(plan):
        ready.output_token_ids.append(7)
        if len(ready.output_token_ids) >= ready.sampling.max_tokens:
            scheduler.finish(ready)
    scheduler.check()
    return plan


def chunks(plan: StepPlan) -> dict[str, int]:
    return {r.request_id: n for r, n in plan.chunks}


def test_a_picture_stays_in_one_piece() -> None:
    """Chunks end before or after a picture; one that does not fit in the step waits, and later requests with it."""
    scheduler = StepScheduler([LayerGroup(BlockPool(64))], StepSizes(4, 8, 16, keeps_images_whole=True))
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
        assert chunks(step(scheduler)) == {"a": 1}, "16 tokens do not fit, and no request may overtake"
    found = [chunks(step(scheduler)) for _ in range(2)]
    assert found == [{"b": 16}, {"b": 16}]


def test_what_is_cached_may_end_inside_a_picture() -> None:
    """The picture's rest is computed in one piece, in a later step if it does not fit."""
    scheduler = StepScheduler(
        [LayerGroup(BlockPool(64))], StepSizes(4, 20, 16, keeps_images_whole=True), PrefixScope("model", Numerics())
    )
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
    assert "late" not in chunks(step(scheduler)), "the budget has one token left, the picture three"
    while late.num_computed_tokens <= 20:
        plan = step(scheduler)
    assert chunks(plan)["late"] == 3


def test_landing_takes_all_blocks_or_none() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    landing = request("landing", 8)
    scheduler.land(landing, 12)
    assert len(landing.tables[0]) == 3
    with pytest.raises(OutOfBlocks):
        scheduler.land(request("other", 8), 12)
    scheduler.check()
    scheduler.landed(landing)
    landing.output_token_ids.append(7)
    assert chunks(scheduler.plan()) == {"landing": 1}


def test_a_request_of_many_sequences_keeps_none_from_beginning() -> None:
    """An eighth of the places is reserved for new requests, however many further sequences run and wait."""
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
    assert computes.status is Status.RUNNING, "it must pass the 25 further sequences that wait"
    assert scheduler.num_seqs == 16
    scheduler.finish(further[0])
    assert not scheduler.can_land(request("third", 4, arrival_s=1.0), 8), "new requests already have their eighth"
    step(scheduler)
    assert sum(each.status is Status.RUNNING for each in further) == 14, "the next sequence gets the free place"
    scheduler.check()


@pytest.mark.parametrize(
    ("landed_as", "asked_as", "hits"), [("", "", 2), ("int8", "int8", 2), ("int8", "", 0), ("", "int8", 0)]
)
def test_kv_that_lost_precision_serves_only_its_like(landed_as: str, asked_as: str, hits: int) -> None:
    scheduler = StepScheduler([LayerGroup(BlockPool(32))], StepSizes(4, 8, 16), PrefixScope("model", Numerics()))
    first, second = request("a", 9), request("b", 9)
    first.kv_precision, second.kv_precision = landed_as, asked_as
    assert scheduler.land(first, 9) == [0]
    scheduler.landed(first)
    assert scheduler.fork(first, 1).kv_precision == landed_as
    for each in list(scheduler.requests.values()):
        scheduler.finish(each)
    assert scheduler.land(second, 9) == [hits * 4]
    scheduler.finish(second)
    local = request("c", 10)  # computed locally, so exact
    scheduler.add(local)
    scheduler.plan()
    assert local.num_cached_tokens == (0 if landed_as else 8)


def test_a_prompt_that_has_begun_gives_way_to_a_higher_priority() -> None:
    """It continues with each step's remaining tokens; among equal priorities no request overtakes."""
    scheduler = make(num_blocks=64)
    long = request("batch", 60)
    scheduler.add(Request("batch", replace(long.order, priority=BATCH_PRIORITY)))
    assert chunks(step(scheduler)) == {"batch": 16}
    scheduler.add(request("one", 10, arrival_s=1.0, max_tokens=2))
    assert chunks(step(scheduler)) == {"one": 10, "batch": 6}
    scheduler.add(request("two", 20, arrival_s=2.0, max_tokens=1))
    assert chunks(step(scheduler)) == {"one": 1, "two": 15}
    assert chunks(step(scheduler)) == {"two": 5, "batch": 11}
    scheduler.add(Request("later", replace(request("later", 4).order, priority=BATCH_PRIORITY), arrival_s=3.0))
    assert chunks(step(scheduler)) == {"batch": 16}


def test_a_prompt_that_has_begun_goes_on_while_a_higher_priority_finds_no_place() -> None:
    scheduler = make(num_blocks=20, max_num_seqs=1)
    scheduler.add(Request("batch", replace(request("batch", 40).order, priority=BATCH_PRIORITY)))
    assert chunks(step(scheduler)) == {"batch": 16}
    scheduler.add(request("one", 10, arrival_s=1.0))
    assert [chunks(step(scheduler)) for _ in range(2)] == [{"batch": 16}, {"batch": 8}]
