"""Requests that may continue before the host has seen the last token, and those that must wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.engine.step.ahead import can_go_ahead
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.types import Guide, Order, Request, Sampling
from tests.support.toy_model import ToyRunner, generate_alone, told_alone

NUM_BLOCKS, BLOCK_SIZE = 40, 4
EVERYTHING: dict[str, Any] = {
    "min_tokens": 6,
    "logit_bias": ((5, 3.0), (9, -2.0)),
    "allowed_token_ids": tuple(range(2, 30)),
    "bad_words": ((4,), (7, 8), (8, 7), (6, 7, 8)),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logprobs": 3,
}


def core_that_goes_ahead() -> EngineCore:
    runner = ToyRunner(NUM_BLOCKS, BLOCK_SIZE)
    runner.goes_ahead = True
    scheduler = StepScheduler(BlockPool(NUM_BLOCKS), BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=32)
    return EngineCore(runner, scheduler)


def run(core: EngineCore, params: Sampling) -> None:
    """The output must equal that of each request alone."""
    request = Request("r", Order([1, 2, 4], params))
    core.scheduler.add(request)
    tokens = [token for _ in range(30) for _, token in core.step().sampled]
    output = [token.token_id for token in tokens]
    assert [output] == generate_alone([1, 2, 4], params)
    if not params.beam_width:
        assert [token.logprobs for token in tokens] == told_alone([1, 2, 4], output, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "asked",
    [{}, *({name: value} for name, value in EVERYTHING.items()), EVERYTHING],
    ids=lambda asked: next(iter(asked), "nothing") if len(asked) < 2 else "everything",
)
def test_what_is_asked_of_the_logits_keeps_nobody_from_going_ahead(asked: dict[str, Any], temperature: float) -> None:
    core = core_that_goes_ahead()
    run(core, Sampling(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True, **asked))
    assert (
        core.ahead.num_ahead == 10
    )  # of twelve tokens: the prompt gives the first, and the second is launched in time


def crowd(core: EngineCore, num_requests: int, prompt: list[int], **asked: Any) -> list[Request]:
    requests = [
        Request(f"r{i}", Order(prompt, Sampling(temperature=0.0, ignore_eos=True, **asked)), arrival_s=float(i))
        for i in range(num_requests)
    ]
    for request in requests:
        core.scheduler.add(request)
    return requests


def waiting_at_early_launches(core: EngineCore) -> list[int]:
    """Runs everything; returns the sequences that waited whenever a step was launched early."""
    seen = []
    for _ in range(200):
        before = core.ahead.num_ahead
        core.step()
        if core.ahead.num_ahead > before:
            seen.append(len(core.scheduler.waiting))
        if not core.scheduler.requests:
            return seen
    raise AssertionError("somebody starves")


def test_steps_go_ahead_while_all_places_are_taken() -> None:
    """Four places, six requests of twelve tokens: the last two wait for all of the first ones' steps but the last."""
    core = core_that_goes_ahead()
    requests = crowd(core, 6, [1, 2, 4], max_tokens=12)
    assert waiting_at_early_launches(core) == [2] * 10 + [0] * 10
    for request in requests:
        assert [request.output_token_ids] == generate_alone([1, 2, 4], request.sampling)


def test_steps_go_ahead_while_blocks_are_too_few() -> None:
    """A place is free, but a third prompt's blocks are not."""
    core = core_that_goes_ahead()
    crowd(core, 3, list(range(4, 4 + 4 * 14)), max_tokens=6)
    assert waiting_at_early_launches(core)[:2] == [1, 1]


def test_a_request_that_could_be_admitted_is_not_made_to_wait() -> None:
    """It arrives while a step is under way and is planned right after it."""
    core = core_that_goes_ahead()
    crowd(core, 2, [1, 2, 4], max_tokens=12)
    for _ in range(3):
        core.step()
    num_ahead = core.ahead.num_ahead
    assert num_ahead > 0
    late = Request("late", Order([1, 2], Sampling(max_tokens=2, temperature=0.0)), arrival_s=9.0)
    core.scheduler.add(late)
    core.step()
    assert core.ahead.num_ahead == num_ahead
    assert late in core.step().plan.admitted


def test_beams_wait_for_the_host() -> None:
    core = core_that_goes_ahead()
    run(core, Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, beam_width=2))
    assert core.ahead.num_ahead == 0


@pytest.mark.parametrize("guide", [None, Guide("regex", "[abc]{9}")], ids=["free", "guided"])
def test_guided_sequences_wait_for_the_host(guide: Guide | None) -> None:
    """And only they do."""
    request = Request("r", Order([1, 2, 4], Sampling(max_tokens=12, guide=guide)), output_token_ids=[5])
    request.num_computed_tokens = 3
    assert can_go_ahead(StepPlan([(request, 1)])) == (guide is None)
