"""Chunks shrink with growing context, and long prompts yield: no request starves, every prompt advances."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

import msgspec
import pytest

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.cluster.instances.known_prefixes import SLICE_NUM_BLOCKS, KnownBlocks, PoolKind, Prompt
from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, StepCost, num_pairs_of
from pd_cluster.engine.scheduling import block_holdings
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.scheduling.step_share import LEAST_CHUNK, LONG_STEPS, MOST_SHARE, StepShare
from pd_cluster.kv import prefix_index
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes, keys_of
from pd_cluster.numerics import Numerics
from pd_cluster.result_tables import percentile
from pd_cluster.simulate.simulated_layout import SimulatedLayout
from pd_cluster.simulate.simulation import simulate
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import CacheKeys

BUDGET, BLOCK_SIZE = 512, 16
LONG = LONG_STEPS * BUDGET + 1
UNMEASURED, SLOW = StepCost(), StepCost(prompt_token_s=1e-6, prompt_pair_s=1e-6)
POOL = PoolKind("model", Numerics(), "", BLOCK_SIZE)


def ask(name: str, num_tokens: int, computed: int = 0, priority: int = 0, leg: str = "prefill") -> Request:
    order = RequestSpec([1] * num_tokens, Sampling(), priority=priority)
    request = Request(name, order, arrival_s=float(len(name)), leg=leg)  # type: ignore[arg-type]
    request.num_computed_tokens = computed
    return request


def scheduler_of(cost: StepCost = UNMEASURED, prefix: PrefixScope | None = None) -> StepScheduler:
    sizes = StepSizes(BLOCK_SIZE, 64, BUDGET, cost=lambda: cost)
    return StepScheduler([LayerGroup(BlockPool(4 * LONG // BLOCK_SIZE))], sizes, prefix)


def sizes_of(plan: StepPlan) -> dict[str, int]:
    return {request.request_id: num_tokens for request, num_tokens in plan.chunks}


def seconds(cost: StepCost, chunks: Sequence[tuple[Request, int]]) -> float:
    """Returns the time of these prompts in a step, without the step's fixed time."""
    return sum(
        cost.prompt_token_s * number + cost.prompt_pair_s * num_pairs_of(number, request.num_computed_tokens)
        for request, number in chunks
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_chunk_takes_the_time_of_its_step_whatever_its_context(seed: int) -> None:
    rng = random.Random(seed)
    cost = StepCost(1e-3, prompt_token_s=rng.uniform(1e-6, 1e-3), prompt_pair_s=10 ** rng.uniform(-11, -7))
    share = StepShare(BUDGET, BLOCK_SIZE, lambda: cost)
    limit_s = MOST_SHARE * seconds(cost, [(ask("whole", BUDGET), BUDGET)])
    request = ask("long", 1 << 20, rng.randrange(BUDGET, (1 << 20) - BUDGET))
    others = [(ask("other", BUDGET), rng.randrange(2, BUDGET // 2))] if seed % 2 else []
    num_tokens = share.limited(others, request, BUDGET)
    assert num_tokens <= LEAST_CHUNK or seconds(cost, [*others, (request, num_tokens)]) <= limit_s * (1 + 1e-9)
    assert num_tokens == BUDGET or num_tokens % BLOCK_SIZE == 0
    larger = [*others, (request, num_tokens + BLOCK_SIZE)]
    assert num_tokens == BUDGET or seconds(cost, larger) > limit_s


@pytest.mark.parametrize(("computed", "cost"), [(1 << 19, UNMEASURED), (BUDGET - 1, SLOW)])
def test_chunks_stay_whole_without_a_measured_cost_and_without_a_long_context(computed: int, cost: StepCost) -> None:
    share = StepShare(BUDGET, BLOCK_SIZE, lambda: cost)
    assert share.limited([], ask("a", 1 << 20, computed), BUDGET) == BUDGET


def test_chunks_of_a_prompt_that_is_not_long_stay_whole() -> None:
    share = StepShare(BUDGET, BLOCK_SIZE, lambda: SLOW)
    assert share.limited([], ask("usual", LONG - 1, 2 * BUDGET), BUDGET) == BUDGET
    assert share.limited([], ask("long", LONG, 2 * BUDGET), BUDGET) < BUDGET


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """A short prompt enters the next step; a steady flow of them gets three quarters, the long prompt the rest."""
    scheduler = scheduler_of()
    scheduler.add(ask("long", 2 * LONG))
    plan = scheduler.plan()
    assert sizes_of(plan) == {"long": BUDGET}, "alone, it must get the whole step"
    scheduler.computed(plan)
    for number in range(8):
        scheduler.add(ask(f"short {'x' * number}", 200))
    for before in (0, 1, 2, 3):
        sizes = sizes_of(plan := scheduler.plan())
        assert sizes.pop("long") == BUDGET // 4, before
        assert sum(sizes.values()) == 3 * BUDGET // 4
        scheduler.computed(plan)
        for request in [each for each, _ in plan.chunks if not each.num_behind]:
            scheduler.finish(request)
    scheduler.check()


@pytest.mark.parametrize(("priority", "goes_first"), [(-1, True), (0, True), (1, False)])
def test_only_prompts_of_its_priority_or_a_higher_one_pass_a_long_one(priority: int, goes_first: bool) -> None:
    scheduler = scheduler_of()
    scheduler.add(ask("long", LONG))
    scheduler.computed(scheduler.plan())
    scheduler.add(ask("other", 100, priority=priority))
    assert ("other" in sizes_of(scheduler.plan())) is goes_first


def test_a_prompt_that_is_not_long_is_served_in_order_as_before() -> None:
    scheduler = scheduler_of()
    scheduler.add(ask("usual", LONG - 1))
    scheduler.computed(scheduler.plan())
    scheduler.add(ask("later", 100))
    assert sizes_of(scheduler.plan()) == {"usual": BUDGET}


def test_decodes_are_not_part_of_what_others_may_take() -> None:
    scheduler = scheduler_of()
    for number in range(12):
        request = ask(f"decode {'x' * number}", 17, leg="hybrid")
        scheduler.add(request)
    scheduler.computed(plan := scheduler.plan())
    for request, _ in plan.chunks:
        request.output_token_ids.append(1)
    scheduler.add(ask("long prompt of a prefill leg", LONG))
    scheduler.computed(plan := scheduler.plan())
    for request, num_tokens in plan.chunks:
        if num_tokens == 1:
            request.output_token_ids.append(1)
    scheduler.add(ask("short prompt behind the long one of it", BUDGET))
    sizes = sizes_of(scheduler.plan())
    assert list(sizes.values()) == [1] * 12 + [375, 125]


def arrival(at_s: float, num_tokens: int) -> Arrival:
    return Arrival(at_s=at_s, num_prompt_tokens=num_tokens, num_output_tokens=4)


def test_first_tokens_of_short_requests_take_at_most_three_times_as_long_beside_a_long_prompt() -> None:
    """Checks the 99th percentile by the simulator, with the real scheduler, router and admission in simulated time."""
    step = StepCost(1.5e-3, 2e-4, 1e-9, prompt_token_s=16e-6, prompt_pair_s=2e-9)
    host, handover = HostCost(0.0005, 0.0003, 0.0001), HandoverCost(0.002, 1e-9)
    costs = Costs(model="m", device="cpu", source="computed", step=step, host=host, handover=handover)
    costs = msgspec.structs.replace(costs, kv_token_nbytes=128, num_blocks=8192, max_num_batched_tokens=256)
    rng, sent_s, short, long = random.Random(0), 0.0, list[Arrival](), arrival(6.0, 1 << 16)
    while (sent_s := sent_s + rng.expovariate(10.0)) < 11.0:
        short.append(arrival(sent_s, 200))
    arrivals = sorted([*short, long], key=lambda each: each.at_s)
    found = simulate(SimulatedLayout(num_prefill=1, num_decode=1), costs, arrivals)
    ttft_s = {each: outcome.ttft_s or 0.0 for each, outcome in zip(arrivals, found.outcomes, strict=True)}
    assert ttft_s[long] > 5.0, "it must be computed until the last short one arrives"
    alone = [ttft_s[each] for each in short if each.at_s < long.at_s]
    beside = [ttft_s[each] for each in short if each.at_s > long.at_s]
    assert percentile(beside, 99) <= 3 * percentile(alone, 99)  # type: ignore[operator]


def test_each_token_is_hashed_once_however_many_chunks_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def noted(parent: bytes, token_ids: Sequence[int], *rest: object) -> list[bytes]:
        hashed.append(len(token_ids))
        return chain_hashes(parent, token_ids, *rest)  # type: ignore[arg-type]

    for module in (block_holdings, prefix_index):
        monkeypatch.setattr(module, "chain_hashes", noted)
    scheduler = scheduler_of(StepCost(prompt_token_s=1e-6, prompt_pair_s=1e-9), PrefixScope("model", Numerics()))
    request = ask("long", LONG)
    scheduler.add(request)
    while request.num_behind:
        scheduler.computed(scheduler.plan())
    assert LONG - BLOCK_SIZE < sum(hashed) <= LONG


def test_a_router_and_an_engine_in_one_process_hash_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def noted(parent: bytes, token_ids: Sequence[int], *rest: object) -> list[bytes]:
        hashed.append(len(token_ids))
        return chain_hashes(parent, token_ids, *rest)  # type: ignore[arg-type]

    for module in (block_holdings, prefix_index):
        monkeypatch.setattr(module, "chain_hashes", noted)
    order = RequestSpec([at * at % 997 for at in range(40 * BLOCK_SIZE + 3)], Sampling(max_tokens=4))
    root = PrefixScope(POOL.model_identity, POOL.numerics, POOL.draft_head).root(order)
    known = KnownBlocks()
    known.apply(CacheKeys(keys_of(chain_hashes(root, order.prompt_token_ids, BLOCK_SIZE)), b"", True, "device"))
    assert Prompt(order).num_cached(POOL, known) == 40 * BLOCK_SIZE
    scheduler = scheduler_of(StepCost(), PrefixScope(POOL.model_identity, POOL.numerics, POOL.draft_head))
    request = Request("r", order)
    scheduler.add(request)
    while request.num_behind:
        scheduler.computed(scheduler.plan())
    assert request.block_hashes[:40] == chain_hashes(root, order.prompt_token_ids, BLOCK_SIZE)
    assert sum(hashed) == 40 * BLOCK_SIZE


def known_of(prompt: list[int], num_blocks: int) -> KnownBlocks:
    root = PrefixScope(POOL.model_identity, POOL.numerics, POOL.draft_head).root(RequestSpec(prompt, Sampling()))
    known = KnownBlocks()
    known.apply(CacheKeys(keys_of(chain_hashes(root, prompt, BLOCK_SIZE)[:num_blocks]), b"", True, "device"))
    return known


@pytest.mark.parametrize("num_known", [0, 1, SLICE_NUM_BLOCKS - 1, SLICE_NUM_BLOCKS, 3 * SLICE_NUM_BLOCKS + 5, 1200])
def test_a_prompt_is_hashed_as_far_as_an_instance_knows_it(num_known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [at * at % 997 for at in range(1200 * BLOCK_SIZE + 1)]
    known = known_of(prompt, num_known)
    slices: list[int] = []

    def noted(parent: bytes, token_ids: Sequence[int], *rest: object) -> list[bytes]:
        slices.append(len(token_ids) // BLOCK_SIZE)
        return chain_hashes(parent, token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prefix_index, "chain_hashes", noted)
    asked = Prompt(RequestSpec(prompt, Sampling()))
    asyncio.run(asked.look_up(POOL, known))
    assert max(slices) <= SLICE_NUM_BLOCKS
    assert sum(slices) <= num_known + SLICE_NUM_BLOCKS
    slices.clear()
    assert asked.num_cached(POOL, known) == num_known * BLOCK_SIZE
    assert not slices, "the cost must be looked up first"
    known.apply(CacheKeys(removed=keys_of([bytes(8)])))
    assert asked.num_cached(POOL, known) == num_known * BLOCK_SIZE
    first = next(iter(known.tiers), None)
    if first is not None:
        known.apply(CacheKeys(removed=first.to_bytes(8, sys.byteorder)))
        assert asked.num_cached(POOL, known) == 0, "a change must count at once"
        known = known_of(prompt, num_known)
    assert Prompt(RequestSpec(prompt, Sampling())).num_cached(POOL, known) == num_known * BLOCK_SIZE
    assert asked.keys[POOL][:num_known] == [*known.tiers]
