"""The simulator: times follow from costs, its shortcut changes nothing, and its plans equal a real worker's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, NeighbourCost, StepCost, StepWork
from pd_cluster.engine.handover.shipping import MIN_LAYERS_NBYTES
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.simulate import simulated_instance as simulated_instance
from pd_cluster.simulate.equal_steps import MADE_UP_TOKEN, num_equal_steps, take_equal_steps
from pd_cluster.simulate.event_script import ScriptLine, read_script
from pd_cluster.simulate.simulated_cluster import SimulatedCluster
from pd_cluster.simulate.simulated_layout import Simulated, SimulatedLayout, layout_of
from pd_cluster.simulate.simulation import simulate
from pd_cluster.simulate.step_progress import RunProgress, StepRun
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.worker_world import BLOCK_SIZE, World

STEP = StepCost(step_s=0.01, row_s=0.001, context_token_s=1e-6, prompt_token_s=1e-4, prompt_pair_s=1e-8)
COSTS = Costs(
    model="made up",
    device="cpu",
    source="computed",
    step=STEP,
    handover=HandoverCost(0.002, 1e-9),
    kv_token_nbytes=40_000,
    num_blocks=600,
    max_num_seqs=16,
    max_num_batched_tokens=512,
)
BUSY = msgspec.structs.replace(COSTS, host=HostCost(0.001, 0.0005, 0.0001))


def arrivals(num: int, rate: float, seed: int = 0, longest: int = 900) -> list[Arrival]:
    rng, at_s, found = random.Random(seed), 0.0, []
    for number in range(num):
        at_s += rng.expovariate(rate)
        num_prompt, shared = rng.randrange(1, longest), rng.randrange(8)
        ids = tuple(shared * 100 + at if at < 4 else 10_000 * (number + 1) + at for at in range(-(-num_prompt // 64)))
        found.append(
            Arrival(
                at_s=at_s,
                num_prompt_tokens=num_prompt,
                num_output_tokens=rng.randrange(1, 60),
                hash_ids=ids,
                block_tokens=64,
                session=f"session-{shared}",
            )
        )
    return found


def bytes_of(found: Simulated) -> bytes:
    return msgspec.json.encode([found.outcomes, found.samples, found.events, found.duration_s])


def test_times_follow_from_costs() -> None:
    """A single request takes two prompt chunks, the handover of the rest, and one step per token."""
    request = Arrival(at_s=3.0, num_prompt_tokens=700, num_output_tokens=11)
    pairs = sum(range(513, 701))
    first = STEP.seconds(StepWork(0, 0, 512, sum(range(1, 513))))
    prefill_s = first + STEP.seconds(StepWork(0, 0, 188, pairs))
    decode_s = [STEP.seconds(StepWork(1, 701 + at, 0, 0)) for at in range(10)]

    (alone,) = simulate(SimulatedLayout(num_hybrid=1), COSTS, [request]).outcomes
    assert alone.ttft_s == pytest.approx(prefill_s)
    assert alone.e2e_s == pytest.approx(prefill_s + sum(decode_s))
    assert alone.longest_gap_s == pytest.approx(max(decode_s))

    (split,) = simulate(SimulatedLayout(num_prefill=1, num_decode=1), COSTS, [request]).outcomes
    left_s = MIN_LAYERS_NBYTES * COSTS.handover.byte_s  # more than the last layer of the second chunk
    assert split.prefill_s == pytest.approx(prefill_s)
    assert split.handover_s == pytest.approx(left_s + 0.002)
    assert split.e2e_s == pytest.approx(prefill_s + left_s + 0.002 + sum(decode_s))
    assert (split.prefill, split.decode, split.num_output_tokens) == ("prefill-0", "decode-0", 11)


def test_equal_runs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = arrivals(60, 8.0)
    for layout in (SimulatedLayout(num_hybrid=1), SimulatedLayout(num_prefill=1, num_decode=1)):
        quick = simulate(layout, BUSY, load)
        with monkeypatch.context() as patch:
            patch.setattr(simulated_instance, "LEAST_RUN", 1 << 40)
            slow = simulate(layout, BUSY, load)
        assert len(quick.gaps) == len(slow.gaps)
        for one, other in zip(quick.outcomes, slow.outcomes, strict=True):
            assert (one.e2e_s, one.prefill_s) == (
                pytest.approx(other.e2e_s, rel=0.02),
                pytest.approx(other.prefill_s, rel=0.02),
            )
        gaps = [
            (one.longest_gap_s, other.longest_gap_s) for one, other in zip(quick.outcomes, slow.outcomes, strict=True)
        ]
        assert sum(gap == pytest.approx(known, rel=0.1) for gap, known in gaps) >= 0.95 * len(gaps)  # not early holds


def test_equal_steps_are_as_many_single_ones() -> None:
    num_taken = 0
    for seed in range(90):
        one, other = (running_scheduler(seed) for _ in range(2))
        most = num_equal_steps(one)
        if not most:
            continue
        num_steps = random.Random(seed).randrange(1, most + 1)
        num_taken += num_steps
        take_equal_steps(one, num_steps)
        for _ in range(num_steps):
            assert step(other) == [(request.request_id, 1) for request in other.running]
        assert standing(one) == standing(other)
        one.check()
    assert num_taken > 200


def running_scheduler(seed: int) -> StepScheduler:
    """Returns a scheduler with a few requests in random states, often short of blocks and places."""
    rng = random.Random(seed)
    groups = [LayerGroup(BlockPool(rng.randrange(10, 40)))]
    scheduler = StepScheduler(
        groups, StepSizes(4, rng.randrange(1, 6), rng.randrange(4, 40)), PrefixScope("m", Numerics())
    )
    for number in range(rng.randrange(1, 7)):
        prompt = [rng.randrange(3)] * rng.randrange(1, 24)
        sampling = Sampling(max_tokens=rng.randrange(2, 30), temperature=0.0, ignore_eos=True)
        scheduler.add(Request(f"r{number}", RequestSpec(prompt, sampling), arrival_s=float(number)))
    for _ in range(rng.randrange(1, 14)):
        step(scheduler)
    return scheduler


def step(scheduler: StepScheduler) -> list[tuple[str, int]]:
    plan = scheduler.plan()
    for request in scheduler.computed(plan):
        request.output_token_ids.append(MADE_UP_TOKEN)
        if len(request.output_token_ids) >= request.sampling.max_tokens:
            scheduler.finish(request)
    return [(request.request_id, num_tokens) for request, num_tokens in plan.chunks]


def standing(scheduler: StepScheduler) -> list[Any]:
    known = [(r.request_id, r.num_computed_tokens, r.num_tokens, len(r.tables[0])) for r in scheduler.requests.values()]
    lists = [[r.request_id for r in each] for each in (scheduler.running, scheduler.waiting)]
    contents = sorted(scheduler.blocks.follow())
    return [sorted(known), lists, contents, scheduler.blocks.num_free, scheduler.blocks.num_cached]


Plans = list[list[tuple[int, int]]]


def recorded(monkeypatch: pytest.MonkeyPatch, names: dict[str, int]) -> Plans:
    """Records the plans of all engines; requests are named in the order of their first steps."""
    plans: Plans = []
    run: Callable[..., Any] = EngineCore.run

    def noting(core: EngineCore, plan: Any, *more: Any) -> Any:
        if plan.chunks:
            plans.append([(names.setdefault(r.request_id, len(names)), num) for r, num in plan.chunks])
        return run(core, plan, *more)

    monkeypatch.setattr(EngineCore, "run", noting)
    return plans


def test_plans_are_those_of_a_real_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real worker with tensors and a sampler, stepped manually, plans the same requests in the same steps."""
    rng, step_s = random.Random(5), 0.2
    load = [
        Arrival(
            at_s=step_s * number / 2 + 0.03 * (number > 0),
            num_prompt_tokens=rng.randrange(1, 24),
            num_output_tokens=rng.randrange(1, 9),
            hash_ids=(rng.randrange(3), *(10 * number + at for at in range(1, 6))),
            block_tokens=BLOCK_SIZE,
        )
        for number in range(60)
    ]
    monkeypatch.setattr(simulated_instance, "LEAST_RUN", 1 << 40)
    monkeypatch.setattr(SimulatedLayout, "routing", RoutingConfig(max_queue_s=None))  # so all wait at the worker
    names: dict[str, int] = {}
    plans = recorded(monkeypatch, names)
    costs = Costs(
        model="made up",
        device="cpu",
        source="computed",
        step=StepCost(step_s=step_s),
        num_blocks=16,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    simulate(SimulatedLayout(num_hybrid=1), costs, load)
    simulated = plans[:]
    plans.clear()
    names.clear()
    world, number = World(), 0
    started_s = load[0].at_s
    while number < len(load) or world.worker.core.scheduler.requests:
        while number < len(load) and load[number].at_s <= started_s + world.now_s + 1e-9:
            each = load[number]
            prompt = [token for hash_id in each.hash_ids for token in [hash_id] * BLOCK_SIZE][: each.num_prompt_tokens]
            sampling = Sampling(max_tokens=each.num_output_tokens, temperature=0.0, ignore_eos=True)
            world.submit(f"r-{number}", [token % 11 for token in prompt], sampling)
            number += 1
        world.step()
    assert len(plans) > 60
    assert simulated == plans


def test_a_cluster_survives_its_script() -> None:
    """With deaths, a join, drains, and changed roles and speeds, all requests are answered, nothing stays held, and two
    runs give the same bytes.
    """
    lines = [
        ScriptLine(at_s=1.0, what="kill", instance="decode-0"),
        ScriptLine(at_s=2.0, what="kill", instance="prefill-0"),
        ScriptLine(at_s=3.0, what="join", instance="decode-0"),
        ScriptLine(at_s=3.5, what="join", instance="prefill-7"),
        ScriptLine(at_s=4.0, what="drain", instance="prefill-1"),
        ScriptLine(at_s=5.0, what="undrain", instance="prefill-1"),
        ScriptLine(at_s=5.5, what="speed", instance="decode-1", slowdown=3.0),
        ScriptLine(at_s=6.0, what="role", instance="decode-1", role="prefill"),
        ScriptLine(at_s=7.0, what="remove", instance="prefill-7"),
    ]
    layout = SimulatedLayout(num_prefill=2, num_decode=2, are_neighbours=True)
    costs = msgspec.structs.replace(BUSY, neighbour=NeighbourCost(1.5, 1.2))
    load = arrivals(120, 12.0)
    lives: list[Any] = []
    start = SimulatedCluster.start_instance

    def noting(cluster: SimulatedCluster, instance: Any) -> None:
        start(cluster, instance)
        lives.append(cluster.lives[instance.name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedCluster, "start_instance", noting)
        found = simulate(layout, costs, load, script=lines)
    assert not [each.error for each in found.outcomes if each.error]
    assert [each.num_output_tokens for each in found.outcomes] == [each.num_output_tokens for each in load]
    assert {each.decode for each in found.outcomes} >= {"decode-0", "decode-1"}
    assert [what for _, what in found.events][:2] == ["decode-0: kill", "prefill-0: kill"]
    for life in lives:
        life.worker.core.scheduler.check()
        assert life.is_dead or not life.worker.core.scheduler.blocks.num_held
    assert bytes_of(simulate(layout, costs, load, script=lines)) == bytes_of(found)


def test_neighbours_slow_what_is_beside_them() -> None:
    """A run at half speed from its middle takes 1.5 times as long; a run of equal steps ends at the current step."""
    progress = RunProgress(StepRun(2.0, 0.0, 10), 100.0, 1.0)
    progress.slow(110.0, 2.0)
    assert progress.end_s == pytest.approx(130.0)
    progress.cut(111.0)
    assert (progress.run.num_steps, progress.end_s) == (6, pytest.approx(114.0))
    load = [Arrival(at_s=0.1 * at, num_prompt_tokens=600, num_output_tokens=40) for at in range(20)]
    alone = simulate(SimulatedLayout(num_prefill=1, num_decode=1), COSTS, load)
    slowed = msgspec.structs.replace(COSTS, neighbour=NeighbourCost(decode_beside_prefill=2.0))
    beside = simulate(SimulatedLayout(num_prefill=1, num_decode=1, are_neighbours=True), slowed, load)
    tpot_s = [[each.tpot_s or 0.0 for each in found.outcomes] for found in (alone, beside)]
    assert sum(tpot_s[1]) == pytest.approx(2.0 * sum(tpot_s[0]), rel=0.25)


def test_what_cannot_be_is_refused(tmp_path: Any) -> None:
    for written in ("", "3X", "2P", "1P1D1H", "0P0D"):
        with pytest.raises(ConfigError, match="--layout"):
            layout_of(written)
    assert layout_of("2p1d") == SimulatedLayout(num_prefill=2, num_decode=1)
    file = tmp_path / "script"
    file.write_text(
        '{"at_s": 1, "what": "kill", "instance": "decode-0"}\n{"at_s": 1, "what": "eat", "instance": "x"}\n'
    )
    with pytest.raises(ConfigError, match=r"line 2: .*what"):
        read_script(str(file))
    kill = ScriptLine(at_s=0.0, what="kill", instance="decode-9")
    with pytest.raises(ConfigError, match=r"at_s 0: .*decode-9"):
        simulate(SimulatedLayout(num_hybrid=1), COSTS, arrivals(3, 1.0), script=[kill])
