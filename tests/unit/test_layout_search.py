"""The layout search equals an exhaustive search, finds the smallest layout, and the load that it cannot serve."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pd_cluster.bench.outcomes import InstanceSample, Outcome, Slo
from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, StepCost
from pd_cluster.errors import ConfigError
from pd_cluster.plan.bottleneck import binding_resource
from pd_cluster.plan.breaking_load import MOST, PRECISION, highest_factor
from pd_cluster.plan.candidate_runs import CandidateRuns, rate_per_s
from pd_cluster.plan.computed_costs import Infeasible
from pd_cluster.plan.layout_candidates import LayoutCandidate, SearchSpace
from pd_cluster.plan.layout_search import Plan, Search
from pd_cluster.plan.plan_goals import PlanGoals
from pd_cluster.plan.successive_halving import order, prefixes
from pd_cluster.simulate.simulated_layout import Simulated, SimulatedLayout
from tests.support.queueing_cluster import simulate_queues

SPACE = SearchSpace(chunks=(256, 1024), seats=(4, 16, 64), policies=("prefix-aware",))
COSTS = Costs(
    model="m",
    device="d",
    source="a test",
    step=StepCost(step_s=0.01, row_s=0.0002, context_token_s=1e-8, prompt_token_s=2e-5, prompt_pair_s=1e-9),
    handover=HandoverCost(0.002, 1e-9),
    kv_token_nbytes=1000,
    num_blocks=100_000,
)


def random_costs(rng: random.Random) -> Costs:
    """Draws costs whose terms vary by a factor of ten."""

    def near(value: float) -> float:
        return value * 10 ** rng.uniform(-0.5, 0.5)

    step = StepCost(near(0.01), near(0.0002), near(1e-8), near(4e-5), near(1e-9), rng.choice((0, 8)))
    return replace_costs(step=step, handover=HandoverCost(near(0.005), near(1e-9)))


def replace_costs(**changes: object) -> Costs:
    return Costs(**{**{name: getattr(COSTS, name) for name in COSTS.__struct_fields__}, **changes})  # type: ignore[arg-type]


def poisson(rng: random.Random, rate: float, num: int = 200, prompt: int = 800, output: int = 60) -> list[Arrival]:
    at_s, found = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(rate)
        lengths = (max(1, round(rng.lognormvariate(0, 0.5) * each)) for each in (prompt, output))
        found.append(Arrival(at_s=at_s, num_prompt_tokens=next(lengths), num_output_tokens=next(lengths)))
    return found


def trials_of(arrivals: list[Arrival], costs: Costs, slo: Slo) -> CandidateRuns:
    return CandidateRuns(arrivals, PlanGoals(slo), lambda _: costs, simulate_queues)


def plan_of(arrivals: list[Arrival], costs: Costs, slo: Slo, num_devices: int) -> Plan:
    return Search(trials_of(arrivals, costs, slo), SPACE).plan(num_devices)


FEW, MANY = range(3), range(3, 40)


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
def test_halving_finds_the_best_of_an_exhaustive_search(seed: int) -> None:
    """Finds a layout with the fewest sufficient devices, or the least overloaded one if none suffices."""
    rng = random.Random(seed)
    costs = random_costs(rng)
    arrivals = poisson(rng, rng.uniform(4, 40))
    slo = Slo(ttft_s=rng.uniform(0.1, 1.0), tpot_s=rng.uniform(0.01, 0.05))
    num_devices = 2 + seed % 3
    everything = trials_of(arrivals, costs, slo)
    every_size = (SPACE.candidates(size) for size in range(1, num_devices + 1))
    tried = [everything.run(each, len(arrivals)) for found in every_size for each in found]
    first = plan_of(arrivals, costs, slo, num_devices).first
    good = [each.candidate.num_devices for each in tried if each.is_met]
    assert first.trial.is_met == bool(good)
    if good:
        assert first.candidate.num_devices == min(good)
    else:
        assert first.trial.strain <= 1.02 * min(tried, key=order).strain


def test_a_plan_has_both_kinds_its_limit_and_says_which_serves_more() -> None:
    """With long prompts beside running answers, splitting wins, and twice the limit's load misses the goals."""
    arrivals = poisson(random.Random(1), 12, prompt=1500, output=200)
    slo = Slo(ttft_s=1.0, tpot_s=0.016)
    plan = plan_of(arrivals, COSTS, slo, 4)
    assert plan.is_met
    assert not plan.first.candidate.is_hybrid
    assert plan.rate_per_s == pytest.approx(rate_per_s(arrivals))
    hybrid = plan.best_of_kind(True)
    assert hybrid is not None
    assert hybrid.limit < plan.first.limit
    trials = trials_of(arrivals, COSTS, slo)
    for factor, is_met in ((plan.first.limit, True), (2 * plan.first.limit, False)):
        assert trials.run(plan.first.candidate, len(arrivals), factor).is_met == is_met
    assert [each.trial.is_met for each in plan.ranked] == sorted((e.trial.is_met for e in plan.ranked), reverse=True)


def test_one_device_is_never_split_and_goals_beyond_reach_name_the_nearest() -> None:
    arrivals = poisson(random.Random(2), 0.5, num=60)
    plan = plan_of(arrivals, COSTS, Slo(ttft_s=2.0), 3)
    assert plan.first.candidate.name == "1H"
    assert plan.best_of_kind(False) is None
    short = plan_of(arrivals, COSTS, Slo(tpot_s=0.001), 2)
    assert not short.is_met
    assert short.first.limit == 0
    assert short.first.trial.strain > 5


def test_layouts_that_do_not_fit_are_left_out_with_the_reason() -> None:
    arrivals = poisson(random.Random(3), 2, num=60)
    trials = trials_of(arrivals, COSTS, Slo(ttft_s=1.0))
    trials.costs_of = lambda each: COSTS if each.tp_size == 2 else Infeasible("too small for the weights")
    plan = Search(trials, replace(SPACE, tp_sizes=(1, 2))).plan(4)
    assert plan.left_out == ("too small for the weights",)
    assert all(each.candidate.tp_size == 2 for each in plan.ranked)
    with pytest.raises(ConfigError, match=r"--devices 1: no layout fits: too small for the weights"):
        Search(trials, replace(SPACE, tp_sizes=(1, 2))).plan(1)


def test_more_devices_than_layouts_of_whole_instances_use() -> None:
    sizes = {each.num_devices for each in SearchSpace(tp_sizes=(4,)).candidates(11)}
    assert sizes == {8}
    assert {each.name for each in SearchSpace(tp_sizes=(1, 2)).candidates(4)} == {
        *("4H", "1P3D", "2P2D", "3P1D", "2H TP2", "1P1D TP2")
    }


def test_prefixes_grow_to_the_whole_load() -> None:
    assert prefixes(1000) == [111, 333, 1000]
    assert prefixes(50) == [50]


@pytest.mark.parametrize("limit", [0.03, 0.4, 1.0, 1.7, 20.0])
def test_the_highest_factor_is_found_by_bisection(limit: float) -> None:
    found = highest_factor(lambda factor: factor <= limit)
    assert limit / PRECISION <= found <= limit
    assert highest_factor(lambda factor: True) == MOST
    assert highest_factor(lambda factor: False) == 0


def outcome(number: int, ttft_s: float, prefill_s: float, tpot_s: float = 0.01) -> Outcome:
    times = {"sent_s": 0.0, "first_s": ttft_s, "last_s": ttft_s + 9 * tpot_s, "prefill_s": prefill_s}
    return Outcome(request_id=str(number), num_output_tokens=10, **times)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "running", "held", "expected"),
    [
        ((3.0, 2.8, 0.01), 1, 1, "prefill compute"),
        ((3.0, 0.2, 0.01), 16, 1, "decode seats"),
        ((3.0, 0.2, 0.01), 3, 99, "KV pool"),
        ((3.0, 0.2, 0.01), 3, 1, "links"),
        ((0.1, 0.1, 0.30), 3, 1, "decode compute"),
    ],
)
def test_the_binding_resource_is_read_from_outcomes_and_samples(
    times: tuple[float, float, float], running: int, held: int, expected: str
) -> None:
    candidate = LayoutCandidate(SimulatedLayout(num_prefill=1, num_decode=1, max_num_seqs=16))
    kinds = {"name": "d", "role": "decode", "num_blocks": 100}
    sample = InstanceSample(at_s=1.0, num_running=running, num_held_blocks=held, **kinds)  # type: ignore[arg-type]
    simulated = Simulated([outcome(i, *times) for i in range(20)], [sample], duration_s=100.0)
    goals = PlanGoals(Slo(ttft_s=1.0, tpot_s=0.1))
    assert binding_resource(candidate, COSTS, simulated, goals) == expected
    busy = replace_costs(host=HostCost(request_s=5.0))
    assert binding_resource(candidate, busy, simulated, goals) == "scheduler"


def test_goals_that_cannot_be_are_refused_by_name() -> None:
    for goals, message in (
        (PlanGoals(Slo()), "--slo-ttft, --slo-tpot, --slo-e2e: none is above 0"),
        (PlanGoals(Slo(ttft_s=float("nan"))), "--slo-ttft nan: expected a number of seconds"),
        (PlanGoals(Slo(ttft_s=1.0), 1.5), "--slo-share 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            goals.check()
    failed = Outcome(request_id="x", sent_s=0.0, error="lost")
    assert PlanGoals(Slo(ttft_s=1.0), 0.5).strain([failed, outcome(1, 0.5, 0.1)]) == 0.5
