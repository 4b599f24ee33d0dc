"""`pd-cluster profile`: its requests to engines, and its costs from their times. Uses fake engines."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

import pytest
from msgspec.structs import astuple, replace

from pd_cluster.bench.profile_cluster import SpentTime, fit_handover, host_cost
from pd_cluster.bench.profile_messages import EngineReady, Steps, TimedStep
from pd_cluster.bench.profile_steps import measure_alone, measure_beside, steps_of
from pd_cluster.bench.profiled_engine_process import ProfiledEngine
from pd_cluster.bench.served_steps import Timeline, served_steps, with_served
from pd_cluster.costs.cost_fit import fit_step
from pd_cluster.costs.linear_costs import Costs, HandoverCost, NeighbourCost, StepCost, StepWork, num_pairs_of

READY = EngineReady(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=4096, num_blocks=4096, block_size=16)
TRUE = StepCost(5e-5, 3e-6, 1e-9, 1e-6, 2e-11)


class MadeUpEngine:
    """An engine whose steps take the time given by TRUE, and `slower` times that while the other engine runs."""

    ready = READY

    def __init__(self, slower: float) -> None:
        self._slower, self.others_run = slower, asyncio.Event()
        self.other: MadeUpEngine | None = None

    async def run(self, asked: Steps) -> list[TimedStep]:
        is_beside = asked.num_steps > 100
        if is_beside and self.other is not None:
            self.other.others_run.set()
            await asyncio.wait_for(self.others_run.wait(), 5.0)
        timed: list[TimedStep] = []
        now_s = 0.0
        for at in itertools.count():
            if at >= min(asked.num_steps, 40):
                return timed
            for work in self._works(asked, at):
                took_s = TRUE.seconds(work) * (self._slower if is_beside else 1.0)
                timed.append(TimedStep(now_s, took_s, work))
                now_s += took_s
        raise AssertionError

    def _works(self, asked: Steps, at: int) -> list[StepWork]:
        rows = asked.num_rows, asked.num_rows * (asked.num_context + at)
        starts = range(0, asked.num_prompt_tokens, READY.max_num_batched_tokens)
        chunks = [(start, min(READY.max_num_batched_tokens, asked.num_prompt_tokens - start)) for start in starts]
        return [StepWork(*rows, num, num_pairs_of(num, start)) for start, num in chunks] or [StepWork(*rows)]


def engine(slower: float) -> ProfiledEngine:
    return cast(ProfiledEngine, MadeUpEngine(slower))


@pytest.mark.parametrize(
    "ready",
    [
        READY,
        EngineReady(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, num_blocks=8, block_size=16),
        EngineReady(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=131072, num_blocks=900, block_size=64),
    ],
)
def test_steps_fit_the_engine_that_runs_them(ready: EngineReady) -> None:
    asked = steps_of(ready)
    assert any(each.num_rows and not each.num_prompt_tokens for each in asked)
    assert any(each.num_prompt_tokens and not each.num_rows for each in asked)
    for each in asked:
        assert each.num_rows <= ready.max_num_seqs
        num_tokens = each.num_rows * (each.num_context + each.num_steps) + each.num_prompt_tokens
        assert num_tokens <= ready.num_blocks * ready.block_size
        assert max(each.num_context + each.num_steps, each.num_prompt_tokens) <= ready.max_model_len


async def test_known_steps_give_their_costs_and_both_neighbours_factors() -> None:
    prefill, decode = MadeUpEngine(1.25), MadeUpEngine(2.0)
    prefill.other, decode.other = decode, prefill
    alone = await measure_alone(cast(ProfiledEngine, decode), 0.05)
    found, error = fit_step(list(alone.values()))
    assert error < 0.001
    for work in (StepWork(20, 5_000), StepWork(0, 0, 300, num_pairs_of(300, 2_000)), StepWork(3, 900, 100, 5_050)):
        assert found.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)
    factors, spreads = await measure_beside(cast(ProfiledEngine, prefill), cast(ProfiledEngine, decode), alone, 1.0)
    assert factors.prefill_beside_decode == pytest.approx(1.25, rel=0.01)
    assert factors.decode_beside_prefill == pytest.approx(2.0, rel=0.01)
    assert max(spreads.values()) < 0.01


def test_handovers_have_a_setup_and_bytes() -> None:
    found = {nbytes: [0.003 + 2e-9 * nbytes, 9.0, 0.003 + 2e-9 * nbytes] for nbytes in (1 << 14, 1 << 18, 1 << 22)}
    cost, error = fit_handover(found)
    assert (cost.setup_s, cost.byte_s) == pytest.approx((0.003, 2e-9))
    assert error < 1e-6
    assert fit_handover({}).cost == HandoverCost()


def test_long_answers_tell_a_message_from_a_request() -> None:
    short, long = SpentTime(), SpentTime()
    short.num_requests, short.num_tokens, short.cpu_s = 10, 20, 10 * 0.001 + 20 * 5e-5
    long.num_requests, long.num_tokens, long.cpu_s = 5, 320, 5 * 0.001 + 320 * 5e-5
    alone_s = TRUE.seconds(StepWork(1, 48))
    long.gaps_s = [alone_s + 0.0004] * 5
    cost = host_cost(short, long, TRUE, 16)
    assert (cost.step_s, cost.request_s, cost.message_s) == pytest.approx((0.0004, 0.001, 5e-5))
    long.gaps_s, long.cpu_s = [alone_s / 2], 0.0  # noise
    noisy = host_cost(short, long, TRUE, 16)
    assert (noisy.step_s, noisy.message_s) == (0.0, 0.0)


def timeline(*steps: tuple[int, int, float]) -> Timeline:
    """Steps of one prompt: its tokens from start to stop, and the step's seconds."""
    chunks = [
        {"who": "p", "what": "chunk", "numbers": {"start": start, "stop": stop, "took_us": round(1e6 * took_s)}}
        for start, stop, took_s in steps
    ]
    others = [{"who": who, "what": what, "numbers": {}} for who, what in (("p", "admitted"), ("d", "decode start"))]
    return {"prefill": "p", "decode": "d", "events": [others[0], *chunks, others[1]]}


def test_served_steps_are_those_of_the_prefill_instance() -> None:
    found = served_steps([timeline((0, 100, 0.5), (100, 150, 0.3)), timeline((0, 40, 0.5))])
    assert found == [
        (StepWork(num_prompt_tokens=140, num_prompt_pairs=num_pairs_of(100, 0) + num_pairs_of(40, 0)), 0.5),
        (StepWork(num_prompt_tokens=50, num_prompt_pairs=num_pairs_of(50, 100)), 0.3),
    ], "the two chunks of 0.5 s were computed in one step"


def test_served_prompts_correct_what_engines_alone_measured() -> None:
    step = StepCost(step_s=0.02, row_s=0.001, prompt_token_s=1e-3, prompt_pair_s=2e-7, num_flat_rows=8)
    costs = Costs(
        model="m", device="cpu", source="s", step=step, neighbour=NeighbourCost(1.5, 1.1), error={"step": 0.05}
    )
    served = replace(step, prompt_token_s=1.2e-3, prompt_pair_s=2.4e-7)

    def steps(slower: float) -> list[Timeline]:
        works = [StepWork(0, 0, num, num_pairs_of(num, 0)) for num in (1, 16, 128, 512, 1024)]
        return [timeline((0, work.num_prompt_tokens, slower * served.seconds(work))) for work in works]

    found = with_served(costs, served_steps(steps(1.0)), served_steps(steps(1.7)))
    assert astuple(found.step) == pytest.approx(astuple(served), rel=1e-3), "decode steps must stay as they were"
    assert (found.neighbour.decode_beside_prefill, found.neighbour.prefill_beside_decode) == (1.5, pytest.approx(1.7))
    assert found.error == pytest.approx({"step": 0.05, "served_prompts": 0.0, "prefill_beside_decode": 0.0}, abs=1e-4)
    assert with_served(costs, [], []) == costs, "nothing was measured"
