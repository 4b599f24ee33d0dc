"""Roles by cost, on simulated instances under a seeded Poisson load, second by second."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.processes.api_processes import ApiProcesses
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.roles.auto_role import Decision, Flip
from pd_cluster.cluster.roles.role_costs import InstanceCost, RoleGoals, RoleModel, RoleNeed, Split, Work, best_split
from pd_cluster.cluster.roles.role_traffic import RoleTraffic
from pd_cluster.cluster.roles.roles_by_cost import RolesByCost
from pd_cluster.costs.linear_costs import StepCost, StepWork
from pd_cluster.process_messages import Busy, Stats
from pd_cluster.settings.process_configs import ApiProcessConfig
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.types import Sampling
from tests.support.role_world import Asked, Pace, Phase, RoleWorld
from tests.support.router_world import FakeMembership, World, info_of

GOALS = RoleGoals(ttft_s=3.0, tpot_s=0.1)
PACE = Pace(prompt_tokens_per_s=2000.0, step_s=0.02, num_seqs=16)
SPLITS = ((1, 3), (2, 2), (3, 1))
HOUR_S = 3600.0
PROMPTS = Phase(900.0, 2.0, 2000, 100)  # prefill work for two instances, decode work for a quarter of one
ANSWERS = Phase(900.0, 2.0, 200, 800)  # mostly decode work
STEADY = (  # loads with a clearly best split, and loads at which two splits are nearly equal
    Phase(HOUR_S, 2.0, 1000, 350, 0.5),
    Phase(HOUR_S, 1.8, 2000, 300, 0.5),
    Phase(HOUR_S, 6.0, 300, 200, 0.8),
    Phase(HOUR_S, 0.9, 2000, 1400, 0.5),
    Phase(HOUR_S, 1.3, 2000, 600, 0.8),
    Phase(HOUR_S, 0.2, 4000, 500, 1.0),
)


def goodput(found: list[Asked], begin_s: float = 0.0, end_s: float = float("inf")) -> float:
    """Returns the share of these arrivals that met the goals."""
    during = [each for each in found if begin_s <= each.at_s < end_s]
    return sum(each.meets(GOALS.ttft_s, GOALS.tpot_s) for each in during) / len(during)


def best_static(phase: Phase, seed: int) -> tuple[tuple[int, int], float]:
    shares = {split: goodput(RoleWorld(*split, PACE).run([phase], seed)) for split in SPLITS}
    return max(shares.items(), key=lambda each: each[1])


def chosen(world: RoleWorld, goals: RoleGoals = GOALS) -> RolesByCost:
    return RolesByCost(world.figures, goals, world.drain_timeout_s)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 7))])
@pytest.mark.parametrize(
    "phases", [[PROMPTS, ANSWERS, PROMPTS], pytest.param([ANSWERS, PROMPTS, ANSWERS], marks=pytest.mark.slow)]
)
def test_roles_follow_lengths_that_shift_twice(phases: list[Phase], seed: int) -> None:
    first, _ = best_static(phases[0], seed)
    world = RoleWorld(*first, PACE)
    found = world.run(phases, seed, chosen(world).observe)
    begun_s = 0.0
    for phase in phases:
        mine = goodput(found, begun_s, begun_s + phase.duration_s)
        assert mine >= 0.9 * best_static(phase, seed)[1], world.flips
        moved = [at_s - begun_s for at_s, _ in world.flips if begun_s <= at_s < begun_s + phase.duration_s]
        assert len(moved) == (0 if not begun_s else 2)
        assert all(at_s <= 60 for at_s in moved)
        begun_s += phase.duration_s


def hold_still(phase: Phase, hours: float, seed: int, goals: RoleGoals = GOALS) -> None:
    split, _ = best_static(phase._replace(duration_s=900.0), seed)
    world = RoleWorld(*split, PACE)
    auto = chosen(world, goals)
    world.run([phase._replace(duration_s=hours * HOUR_S)], seed, auto.observe)
    assert not world.flips
    assert auto.last is not None
    assert auto.last.verdict in ("served", "best", "last", "goals", "unsure")


@pytest.mark.parametrize("phase", STEADY[1:3])
def test_a_steady_load_moves_nothing_for_an_hour(phase: Phase) -> None:
    hold_still(phase, 1, seed=3)


@pytest.mark.slow  # takes a minute: ten simulated hours each
@pytest.mark.parametrize("goals", [GOALS, RoleGoals()])
@pytest.mark.parametrize("phase", STEADY)
def test_a_steady_load_moves_nothing_for_ten_hours(phase: Phase, goals: RoleGoals) -> None:
    hold_still(phase, 10, seed=7, goals=goals)


def test_silence_moves_nothing_whatever_came_before() -> None:
    world = RoleWorld(1, 3, PACE)
    auto = chosen(world)
    busy = Phase(10.0, 2.0, 2000, 100)
    world.run([busy, Phase(10 * HOUR_S, 0.0, 1, 1)], 1, auto.observe)
    assert not [at_s for at_s, _ in world.flips if at_s > 150]
    assert auto.last is not None
    assert auto.last.verdict == "silent"


def test_lengths_that_change_all_the_time_move_few() -> None:
    """Phases end as soon as roles have followed them, so changing back must take longer each time."""
    world = RoleWorld(2, 2, PACE)
    world.run([each._replace(duration_s=60.0) for each in (PROMPTS, ANSWERS)] * 30, 1, chosen(world).observe)
    turns = sum(one != other for (_, one), (_, other) in itertools.pairwise(world.flips))
    assert turns <= 6


def look(world: RoleWorld, traffic: Stats, num: int = 70, goals: RoleGoals = GOALS) -> tuple[RolesByCost, Flip | None]:
    """Observes constant loads with counts growing from 0, second by second; returns the policy and its change."""
    counts: dict[str, int] = {}
    auto = RolesByCost(lambda: (Stats(counts), Busy()), goals)
    flip = None
    for at in range(num):
        counts.update({name: number * at for name, number in traffic.counters.items()})
        flip = flip or auto.observe(float(at), world.cluster.membership.instances)
    return auto, flip


def counts_of(phase: Phase) -> Stats:
    """Returns one second's counts for requests of equal lengths whose answers all end."""
    num, prompt, answer = round(phase.rate_per_s), phase.num_prompt_tokens, phase.num_output_tokens
    arrived = {"requests": num, "answers": num, "prompt_tokens": num * prompt, "max_tokens": num * 4096}
    arrived["prompt_pairs"] = num * prompt * (prompt - 1) // 2
    ended = {"finished_stop": num, "generation_tokens": num * answer, "prompt_tokens_computed": num * prompt}
    return Stats({**{f"arrived_{name}": number for name, number in arrived.items()}, **ended})


def name_of(flip: Flip | None) -> tuple[str, str] | None:
    return None if flip is None else (flip.name, flip.role)


MANY_PROMPTS = counts_of(Phase(1.0, 40.0, 80, 5))  # needs 1.6 prefill instances and 0.25 decode instances


def test_an_instance_that_is_free_to_move_is_moved() -> None:
    world = RoleWorld(1, 3, PACE)
    world.cluster["decode-1"].outstanding_tokens = world.cluster["decode-2"].outstanding_tokens = 9
    auto, flip = look(world, MANY_PROMPTS)
    assert name_of(flip) == ("decode-0", "prefill")
    assert flip is not None
    assert "prompts need 1.6 prefill instances and have 1" in flip.why
    for index in range(3):
        name = f"decode-{index}"
        world.cluster[name].info = info_of(name, "decode", unit="decode-0..2", unit_rank=index, unit_size=3)
    auto, flip = look(world, MANY_PROMPTS)
    assert (flip, auto.last and auto.last.verdict) == (None, "last"), "a unit's members may change by command only"
    auto, flip = look(RoleWorld(1, 1, PACE), MANY_PROMPTS)
    assert (flip, auto.last and auto.last.verdict) == (None, "best"), "one instance of each role must stay"
    hungry = counts_of(Phase(1.0, 40.0, 80, 45))  # two decode instances cannot serve the answers
    auto, flip = look(RoleWorld(1, 3, PACE), hungry)
    assert flip is None


def test_instances_on_their_way_count() -> None:
    world = RoleWorld(2, 3, PACE)
    coming = world.cluster["prefill-1"]
    coming.state = "loading"
    assert look(world, MANY_PROMPTS)[1] is None, "the loading instance will compute prompts soon"
    coming.service = "out"
    assert name_of(look(world, MANY_PROMPTS)[1]) == ("decode-2", "prefill"), "an instance that leaves does not count"
    coming.state, coming.num_outstanding = "ready", 1
    auto, flip = look(world, MANY_PROMPTS)
    assert (flip, auto.last and auto.last.verdict) == (None, "unsettled"), "an instance is draining"
    coming.num_outstanding, world.cluster["decode-0"].next_role = 0, "prefill"
    assert look(world, MANY_PROMPTS)[1] is None, "another instance is changing its role"


def test_without_measurements_or_looks_nothing_moves() -> None:
    world = RoleWorld(1, 3, PACE)
    for each in world.cluster.membership.instances:
        each.load = replace(each.load, step_cost=StepCost())
    auto, flip = look(world, MANY_PROMPTS)
    assert (flip, auto.last and auto.last.verdict) == (None, "unmeasured")
    world = RoleWorld(1, 3, PACE)
    auto, flip = look(world, MANY_PROMPTS, num=14)
    assert (flip, auto.last and auto.last.verdict) == (None, "new")
    counts: dict[str, int] = {}
    auto = RolesByCost(lambda: (Stats(counts), Busy()), GOALS)
    for at in range(40):
        counts.update({name: number * at for name, number in MANY_PROMPTS.counters.items()})
        assert auto.observe(10.0 * at, world.cluster.membership.instances) is None, "not observed in between"


def test_a_slope_that_few_sequences_show_is_not_believed() -> None:
    """Four sequences per step say little about sixteen: decode instances with free places are not overloaded."""
    steep = StepCost(row_s=0.005, prompt_token_s=1 / 2000)
    answers = counts_of(Phase(1.0, 20.0, 10, 50))  # 1,000 tokens/s; two instances with four rows at 20 ms give 400
    for num_rows, goals, flipped in (
        (4, GOALS, None),
        (16, GOALS, ("prefill-1", "decode")),
        (16, RoleGoals(), ("prefill-1", "decode")),
        (4, RoleGoals(ttft_s=3.0, tpot_s=0.015), ("prefill-1", "decode")),
    ):
        world = RoleWorld(2, 2, PACE)
        for each in world.cluster.membership.instances:
            each.load = replace(each.load, step_cost=steep, decode_work=StepWork(num_rows=num_rows))
        assert name_of(look(world, answers, goals=goals)[1]) == flipped


def test_a_machine_that_is_slow_for_moments_moves_nothing() -> None:
    world, counts = RoleWorld(1, 3, PACE), dict[str, int]()
    prefill, some = world.cluster["prefill-0"], counts_of(Phase(1.0, 15.0, 80, 5)).counters  # needs 0.6 instances
    auto = RolesByCost(lambda: (Stats(counts), Busy()), GOALS)
    for at in range(200):
        slow = 3 if at % 20 < 4 else 1
        prefill.load = replace(prefill.load, step_cost=StepCost(prompt_token_s=slow / 2000))
        counts.update({name: number * at for name, number in some.items()})
        assert auto.observe(float(at), world.cluster.membership.instances) is None


def test_a_pile_of_prompts_moves_roles_after_the_last_has_come() -> None:
    world = RoleWorld(1, 3, PACE)
    once = Stats({name: 1000 * number for name, number in counts_of(Phase(1.0, 1.0, 2000, 10)).counters.items()})
    prefill = world.cluster["prefill-0"]
    prefill.load = replace(prefill.load, num_waiting=1000, num_queued_tokens=2_000_000)
    auto = RolesByCost(lambda: (once, Busy()), GOALS)
    flips = [auto.observe(float(at), world.cluster.membership.instances) for at in range(40)]
    assert [name_of(each) for each in flips if each is not None][:1] == [("decode-2", "prefill")]
    auto = RolesByCost(lambda: (once, Busy()), GOALS)
    for at in range(40):
        load = replace(prefill.load, num_waiting=1000 * (at % 3 > 0), num_queued_tokens=2_000_000 * (at % 3 > 0))
        prefill.load = load
        assert auto.observe(float(at), world.cluster.membership.instances) is None, "requests that left unserved"


def test_a_change_that_costs_more_than_it_gains_is_not_made() -> None:
    counts = counts_of(Phase(1.0, 10.0, 2600, 1200))  # needs 1.3 prefill instances and 1.5 decode instances
    world = RoleWorld(1, 3, Pace(20_000, step_s=0.1, num_seqs=800))
    prefill = world.cluster["prefill-0"]
    prefill.load = replace(prefill.load, step_cost=StepCost(prompt_token_s=1 / 20_000))
    assert name_of(look(world, counts)[1]) == ("decode-2", "prefill")
    for each in world.cluster.membership.instances:
        each.load = replace(each.load, num_running=800 * (each.role == "decode"))
    auto, flip = look(world, counts)
    assert (flip, auto.last and auto.last.verdict) == (None, "unsure"), "draining 800 answers would take minutes"


def test_other_schedulers_requests_are_like_ones_own() -> None:
    few = counts_of(Phase(1.0, 20.0, 80, 5))  # needs 0.8 prefill instances
    world = RoleWorld(1, 3, PACE)
    world.cluster["prefill-0"].outstanding_tokens = 10
    assert look(world, few)[1] is None
    world.cluster["prefill-0"].others_tokens = 10
    assert name_of(look(world, few)[1]) == ("decode-2", "prefill")


def test_cached_prompts_and_short_limits_are_less_work() -> None:
    world = RoleWorld(1, 3, PACE)
    counters = dict(MANY_PROMPTS.counters)
    counters["prompt_tokens_cached"] = counters["prompt_tokens_computed"]  # half of the prompt tokens are cached
    assert look(world, Stats(counters))[1] is None
    many_answers = counts_of(Phase(1.0, 4.0, 10, 500))  # 2.5 instances, if memory holds so many tokens
    world = RoleWorld(2, 2, PACE)
    assert name_of(look(world, many_answers)[1]) == ("prefill-1", "decode")
    limited = Stats({**many_answers.counters, "arrived_max_tokens": 4 * 40})
    assert look(RoleWorld(2, 2, PACE), limited)[1] is None


async def test_a_request_counts_when_it_comes() -> None:
    world = World()
    serving, first, _ = await world.begin(Sampling(max_tokens=9, n=2))
    counts = world.router.stats.snapshot().counters
    assert RoleTraffic.of(Stats(counts), Busy())[:5] == (1, 3, 3, 2, 18)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await serving.aclose()


def test_people_and_metrics_hear_why() -> None:
    world, stats = RoleWorld(1, 3, PACE), RequestStats()
    overview = Overview(FakeMembership(world.cluster.membership.instances), lambda: (Stats(), Busy()), RoutingConfig())
    auto, flip = look(world, MANY_PROMPTS)
    assert flip is not None
    for each in (flip, None):
        overview.considered_roles(Decision("served", "all is well") if each is None else auto.last, each)
        stats.considered_roles(Decision("served", "all is well") if each is None else auto.last, each)
    shown = overview.to_json(0.0, 0)
    assert shown["roles"] == {"verdict": "served", "why": "all is well"}
    (mark,) = shown["marks"]
    assert (mark["instance_id"], mark["text"]) == (flip.name, f"becomes prefill by --auto-role: {flip.why}")
    assert "roles" not in overview.to_public(0.0, 0)
    listeners: list[Any] = [None] * 2
    processes = ApiProcesses(cast("list[ApiProcessConfig]", listeners), listeners, [], 1.0, stats)
    counts = processes.stats.counters
    assert (counts["role_changes_prefill"], counts["roles_kept_served"], counts["role_changes_decode"]) == (1, 1, 0)


def test_traffic_reads_what_is_counted() -> None:
    counts = {"arrived_requests": 1, "arrived_prompt_tokens": 2, "arrived_prompt_pairs": 3, "arrived_answers": 4}
    counts |= {"arrived_max_tokens": 5, "prompt_tokens_cached": 6, "prompt_tokens_computed": 7}
    counts |= {"generation_tokens": 8, "finished_stop": 4, "finished_abort": 5}
    assert RoleTraffic.of(Stats(counts), Busy(0, 3, 10, 99)) == RoleTraffic(*range(1, 11))


def test_seats_are_as_many_as_memory_and_goal_allow() -> None:
    """Compares with counting up from one, over random costs."""
    random_ = random.Random(5)
    for _ in range(300):
        step = StepCost(*(random_.random() * scale for scale in (0.05, 1e-3, 1e-6)), 1e-4, 0.0, random_.randrange(9))
        cost = InstanceCost(step, step, 0.0, random_.choice((0, 1, 7, 300)), random_.choice((0, 5000)))
        prompt, answer = random_.randint(1, 3000), random_.randint(1, 800)
        goal_s = random_.choice((0.0, 0.01, 0.06))
        model = RoleModel.of(Work(1, prompt, 0, 1, answer), cost, RoleGoals(0.0, goal_s))
        context = round(prompt + answer / 2)
        most = cost.num_seqs or 256
        if cost.num_cache_tokens:
            most = max(1, min(most, cost.num_cache_tokens // context))
        if goal_s and step.seconds(StepWork(1, context)) <= goal_s:
            most = max(num for num in range(1, most + 1) if step.seconds(StepWork(num, num * context)) <= goal_s)
        assert model.num_seats == most


def test_more_of_a_role_never_serves_it_less() -> None:
    random_ = random.Random(6)
    for _ in range(200):
        step = StepCost(0.01, 1e-4, 0.0, random_.choice((1e-5, 1e-3)), 0.0)
        goals = RoleGoals(random_.choice((0.0, 0.5, 3.0)), random_.choice((0.0, 0.05)))
        model = RoleModel.of(Work(1, 900, 0, 1, 90), InstanceCost(step, step, 0.0, 64), goals)
        need, num = RoleNeed(random_.random() * 8, random_.random() * 8), random_.randint(2, 12)
        loads = [model.loads(need, Split(at, num - at)) for at in range(1, num)]
        assert all(
            one.prefill > other.prefill and one.decode < other.decode for one, other in itertools.pairwise(loads)
        )
        best = best_split(model, need, Split(1, num - 1))
        assert model.served(need, best) >= max(model.served(need, Split(at, num - at)) for at in range(1, num)) - 1e-3
