"""Costs that are fitted while steps run, and routing's predictions from them."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.wait_prediction import (
    TRANSFER_SETUP_S,
    Goals,
    best_rate,
    check_goals,
    predict_step_s,
    predict_transfer_s,
    predict_ttft_s,
)
from pd_cluster.costs.linear_costs import StepCost, StepWork, num_pairs_of
from pd_cluster.costs.online_fit import FIRST_HANDOVERS, OnlineFit, OnlineHandoverFit
from pd_cluster.engine.handover.handover_timing import HandoverTiming
from pd_cluster.engine.step.step_timing import NUM_FIRST_STEPS, StepTiming, work_of
from pd_cluster.errors import Overloaded
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.types import LinkState, Request, RequestSpec, Sampling
from tests.support.router_world import info_of

LAYOUT = wire.LayoutInfo(
    num_layers=4, num_kv_heads=2, planes=keys_and_values(64), block_size=16, dtype="float32", tp_size=1, tp_rank=0
)
TRUE = StepCost(0.006, 0.0002, 3e-7, 8e-5, 1e-8)
DECODE = StepWork(8, 2_400)
PROMPT = StepWork(0, 0, 512, num_pairs_of(512, 0))


class Steps:
    """Simulates an engine's steps with a growing and shrinking batch."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_rows = 8

    def run(self, num: int, count: Callable[[StepWork, float], None], speed: float = 1.0, kinds: str = "dpb") -> None:
        rng = self._rng
        for _ in range(num):
            self._num_rows = min(32, max(1, self._num_rows + rng.choice((-2, -1, 0, 1, 2))))
            kind, num_tokens = rng.choice(kinds), rng.choice((32, 100, 300, 1_000, 2_048))
            rows = (self._num_rows, self._num_rows * rng.randint(200, 400)) if kind in "db" else (0, 0)
            prompt = (num_tokens, num_pairs_of(num_tokens, rng.choice((0, 2_000)))) if kind in "pb" else (0, 0)
            work = StepWork(*rows, *prompt)
            count(work, TRUE.seconds(work) / speed * rng.gauss(1, 0.05))


def test_the_fit_of_running_steps_predicts_others() -> None:
    held_out = [
        DECODE,
        PROMPT,
        StepWork(1, 300),
        StepWork(24, 8_000),
        StepWork(0, 0, 1_000, num_pairs_of(1_000, 1_000)),
    ]
    for seed in range(5):
        fit, steps = OnlineFit(), Steps(seed)
        steps.run(300, fit.add)
        steps.run(2_000, fit.add, kinds="d")  # must not change the prompts' costs
        for work in held_out:
            assert fit.cost.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.15), (seed, work)
        assert min(msgspec.structs.astuple(fit.cost)) >= 0


@pytest.mark.parametrize("speed", [1 / 3, 3.0])
def test_the_fit_follows_a_change_of_speed(speed: float) -> None:
    fit, steps, errors = OnlineFit(), Steps(1), list[float]()

    def compare(work: StepWork, took_s: float) -> None:
        errors.append(abs(fit.cost.seconds(work) - took_s) / took_s)
        fit.add(work, took_s)

    steps.run(200, compare)
    steps.run(300, compare, speed)
    last = errors[-30:]
    assert sum(last) / len(last) < 0.12 < errors[200]


def test_prompts_of_one_length_have_a_time_per_token_and_no_step_of_their_own() -> None:
    fit = OnlineFit()
    for _ in range(30):
        fit.add(PROMPT, 0.512)
    assert fit.cost.prompt_token_s == pytest.approx(1e-3)
    assert fit.cost.step_s < 1e-12
    fit.add(StepWork(), 1.0)
    fit.add(DECODE, 0.0)
    assert fit.cost.prompt_token_s == pytest.approx(1e-3), "neither step had both work and time"


def test_first_steps_are_left_out_after_a_start_and_after_a_sleep() -> None:
    timing = StepTiming()
    for _ in range(2):
        for _ in range(NUM_FIRST_STEPS):
            before = timing.cost
            timing.computed(DECODE, 9.0, 20)
            timing.computed(StepWork(), 5.0, 0)  # a step that only moved blocks
            assert timing.cost == before
        for _ in range(30):
            timing.computed(DECODE, 0.008, 20)
        assert timing.decode_step_s == pytest.approx(0.008)
        assert timing.tokens_per_step == pytest.approx(2.5)
        assert timing.decode_work == DECODE
        assert timing.prompt_work == StepWork()
        timing.start_over()
    assert sum(timing.step_tokens.tally().counts) == 2 * (NUM_FIRST_STEPS + 30), "metrics must count every step"


def test_a_chunk_of_one_token_decodes_and_longer_ones_belong_to_prompts() -> None:
    requests = [Request(str(at), RequestSpec([1] * 50, Sampling())) for at in range(3)]
    for request, num_computed in zip(requests, (51, 50, 20), strict=True):
        request.num_computed_tokens = num_computed
    work = work_of([(requests[0], 1), (requests[1], 30), (requests[2], 20)])
    assert work == StepWork(1, 51, 50, 30 * 20 + 30 * 31 // 2 + 20 * 21 // 2)


def test_handovers_are_a_setup_and_bytes_once_sizes_differ() -> None:
    fit, rng = OnlineHandoverFit(1e-9), random.Random(1)
    assert fit.cost is None
    for _ in range(FIRST_HANDOVERS):
        fit.add(1 << 20, 5.0)
    for _ in range(20):
        fit.add(1 << 20, 0.004 + 1e-8 * (1 << 20))
    assert fit.cost is not None
    assert fit.cost.byte_s == 1e-9, "for steps of one size the assumed cost must stay"
    assert fit.cost.seconds(1 << 20) == pytest.approx(0.004 + 1e-8 * (1 << 20))
    for _ in range(200):
        nbytes = rng.randrange(1 << 22)
        fit.add(nbytes, max(1e-4, 0.004 + 1e-8 * nbytes + rng.gauss(0, 0.001)))
    assert fit.cost.setup_s == pytest.approx(0.004, rel=0.25)
    assert fit.cost.byte_s == pytest.approx(1e-8, rel=0.1)


def test_handovers_are_timed_by_the_transports_of_their_links() -> None:
    timing = HandoverTiming([LAYOUT])
    shm, dist = LinkState("up", ("shm",)), LinkState("up", ("dist", "shm"))
    for _ in range(20):
        timing.add(shm, 100, 0.003)
        timing.add(dist, 100, 0.050)
        timing.add(LinkState("waiting"), 100, 9.0)
        timing.add(shm, 100, 0.0)
    assert list(timing.costs) == ["shm", "dist+shm"]
    prefill, decodes = worker(TRUE), [worker(TRUE) for _ in range(2)]
    for at, decode in enumerate(decodes):
        decode.name, decode.info = f"decode-{at}", info_of(f"decode-{at}", "decode", layout=LAYOUT)
    prefill.info = info_of("prefill-0", "prefill", layout=LAYOUT)
    links = {decodes[0].key: shm, decodes[1].key: dist}
    unmeasured = msgspec.structs.replace(prefill.load, links=links)
    prefill.load = msgspec.structs.replace(unmeasured, handover_costs=timing.costs)
    assert predict_transfer_s(prefill, decodes[0], 100) == pytest.approx(0.003)
    assert predict_transfer_s(prefill, decodes[1], 100) == pytest.approx(0.050)
    prefill.load = unmeasured
    assert predict_transfer_s(prefill, decodes[0], 0) == TRANSFER_SETUP_S


# ---- routing's predictions


def worker(cost: StepCost, ahead: int = 0, prompt: StepWork = PROMPT, decode: StepWork = DECODE) -> Instance:
    load = wire.Load(step_cost=cost, prompt_work=prompt, decode_work=decode, num_running=decode.num_rows)
    return Instance("prefill-0", "prefill", "127.0.0.1", 1, ["0"], load=load, outstanding_tokens=ahead)


def test_rates_are_those_of_the_mean_work() -> None:
    load = worker(TRUE).load
    assert load.decode_step_s == TRUE.seconds(DECODE) == predict_step_s(worker(TRUE))
    assert load.prefill_tokens_per_s == pytest.approx(512 / TRUE.seconds(PROMPT))
    assert (wire.Load().decode_step_s, wire.Load().prefill_tokens_per_s) == (0.0, 0.0)
    assert best_rate([worker(TRUE), worker(StepCost())]) == load.prefill_tokens_per_s
    made_up = load.at_rates(prefill_tokens_per_s=1_000.0, decode_step_s=0.2)
    assert (made_up.prefill_tokens_per_s, made_up.decode_step_s) == (1_000.0, 0.2)


def test_a_load_at_given_rates_can_be_sent() -> None:
    load = wire.Load().at_rates(prefill_tokens_per_s=2000.0, decode_step_s=0.02)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=wire.Load)
    assert (found.prefill_tokens_per_s, found.decode_step_s) == (pytest.approx(2000.0), pytest.approx(0.02))


def test_a_first_token_is_predicted_with_steps_and_context() -> None:
    alone = predict_ttft_s(worker(TRUE), 512, num_prompt_tokens=512)
    assert alone == pytest.approx(TRUE.seconds(PROMPT))
    assert predict_ttft_s(worker(TRUE), 512, num_prompt_tokens=20_512) - alone == pytest.approx(
        512 * 20_000 * TRUE.prompt_pair_s
    )
    behind = predict_ttft_s(worker(TRUE, ahead=1_024), 512, num_prompt_tokens=512)
    assert behind == pytest.approx(3 * alone, rel=1e-3), "two such prompts must come first"
    beside = msgspec.structs.replace(TRUE, row_s=0.01)
    rows = PROMPT._replace(num_rows=4, num_context_tokens=400)
    assert predict_ttft_s(worker(beside, prompt=rows), 512, num_prompt_tokens=512) == pytest.approx(
        beside.seconds(rows)
    )


def test_a_long_context_is_refused_where_the_same_tokens_alone_are_not() -> None:
    prefill, goals = worker(TRUE, ahead=512), Goals(ttft_s=0.2)
    check_goals(goals, [prefill], (prefill, prefill), 512, 512)
    with pytest.raises(Overloaded, match="first token"):
        check_goals(goals, [prefill], (prefill, prefill), 512, 40_000)
