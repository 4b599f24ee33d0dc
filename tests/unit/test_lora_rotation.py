"""Adapters take turns, so that none waits longer than the bound in docs/adapters.md."""

from __future__ import annotations

import random

import pytest

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.lora_rotation import LoraRotation
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.types import Request, RequestSpec, Sampling


def request(name: str, variant: str, num_tokens: int = 4, max_tokens: int = 8) -> Request:
    order = RequestSpec([1] * num_tokens, Sampling(max_tokens=max_tokens), variant=variant)
    return Request(name, order, arrival_s=float(name or 0))


def of(*variants: str) -> list[Request]:
    return [request(str(at), variant) for at, variant in enumerate(variants)]


def test_the_one_that_waited_longest_is_next() -> None:
    rotation = LoraRotation(2)
    requests = of("a", "b", "", "c", "a")
    taking_part = []
    for _ in range(4):
        turn = rotation.next(requests)
        taking_part.append("".join(sorted({each.order.variant for each in requests if turn.has(each)})))
    assert taking_part == ["ab", "ac", "bc", "ab"]
    turn = LoraRotation(2).next(of("a", ""))
    b, c, plain, a = of("b", "c", "", "a")  # a new adapter takes the free place
    assert [turn.admits(each) for each in (plain, a, b, c, b)] == [True, True, True, False, True]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_bound_holds_whatever_arrives(most: int) -> None:
    """With random arrivals, an adapter waits at most (number of wanted adapters) / `most` steps, rounded up."""
    rng = random.Random(most)
    rotation, wanted = LoraRotation(most), [f"{at}" for at in range(9)]
    last: dict[str, tuple[int, int]] = {}  # adapter -> (step after which it waits, number of wanted adapters then)
    for step in range(2000):
        wanted = [each for each in wanted if rng.random() > 0.05] + [f"new-{step}"] * (rng.random() < 0.3)
        rng.shuffle(wanted)
        last = {each: last.get(each, (step, len(wanted))) for each in wanted}
        requests = of(*wanted)
        turn = rotation.next(requests)
        chosen = {each.order.variant for each in requests if turn.has(each)}
        assert len(chosen) == min(most, len(wanted))
        for each, (since, num_wanted) in last.items():
            assert step - since < -(-num_wanted // most) or each in chosen
            if each in chosen:
                last[each] = step + 1, len(wanted)


def steps_of(scheduler: StepScheduler, requests: list[Request]) -> list[set[str]]:
    """Runs all requests to their ends; returns each step's adapters."""
    for each in requests:
        scheduler.add(each)
    found = []
    while scheduler.requests:
        plan = scheduler.plan()
        assert plan.chunks, "requests are left, but a step computes nothing"
        found.append({each.order.variant for each, _ in plan.chunks} - {""})
        for each in scheduler.computed(plan):
            each.output_token_ids.append(1)
            if len(each.output_token_ids) == each.sampling.max_tokens:
                scheduler.finish(each)
        scheduler.check()
        assert len(found) < 2000
    return found


@pytest.mark.parametrize("num_blocks", [64, 12])
@pytest.mark.parametrize("most", [1, 2, 8])
def test_steps_have_so_many_adapters_and_all_requests_end(most: int, num_blocks: int) -> None:
    """Holds with preemptions in a small pool, and with more requests than can run at a time."""
    rng = random.Random(most)
    scheduler = StepScheduler([LayerGroup(BlockPool(num_blocks))], StepSizes(4, 6, 16, most_adapters=most))
    requests = [request(str(at), rng.choice(["", "a", "b", "c", "d"]), rng.randrange(1, 20)) for at in range(24)]
    found = steps_of(scheduler, requests)
    assert min(most, 2) <= max(len(each) for each in found) <= most


def test_without_adapters_there_are_no_turns() -> None:
    assert len(steps_of(StepScheduler([LayerGroup(BlockPool(64))], StepSizes(4, 6, 16)), of("", "", ""))) == 8
