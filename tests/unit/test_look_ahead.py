"""Which requests may be launched before the host has seen their last token, and which must wait for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.step_plan import needs_host
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Guide, Image, Pooling, Request, RequestSpec, Sampling, Span
from tests.support.toy_model import ToyRunner, generate_alone, told_alone

NUM_BLOCKS, BLOCK_SIZE = 40, 4
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
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


def core_that_goes_ahead(max_num_seqs: int = 4) -> EngineCore:
    runner = ToyRunner(NUM_BLOCKS, BLOCK_SIZE)
    runner.goes_ahead = True
    return EngineCore(
        runner, StepScheduler([LayerGroup(BlockPool(NUM_BLOCKS))], StepSizes(BLOCK_SIZE, max_num_seqs, 32))
    )


def run(core: EngineCore, params: Sampling) -> None:
    """Runs a request; asserts that its tokens and, without beams, its logprobs equal those without an engine."""
    request = Request("r", RequestSpec([1, 2, 4], params))
    core.scheduler.add(request)
    tokens = [token for _ in range(30) for _, token in core.step().sampled]
    output = [token.token_id for token in tokens]
    assert [output] == generate_alone([1, 2, 4], params)
    if not params.beam_width:
        assert [token.logprobs for token in tokens] == told_alone([1, 2, 4], output, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("asked", [{}, *({name: value} for name, value in EVERYTHING.items()), EVERYTHING])
def test_what_is_asked_of_the_logits_keeps_nobody_from_going_ahead(asked: dict[str, Any], temperature: float) -> None:
    core = core_that_goes_ahead()
    run(core, Sampling(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True, **asked))
    assert core.ahead.num_ahead == 11  # of twelve steps; the first is planned by the host


def crowd(core: EngineCore, num_requests: int, prompt: list[int], **asked: Any) -> list[Request]:
    requests = [
        Request(f"r{i}", RequestSpec(prompt, Sampling(temperature=0.0, ignore_eos=True, **asked)), arrival_s=float(i))
        for i in range(num_requests)
    ]
    for request in requests:
        core.scheduler.add(request)
    return requests


def waiting_at_early_launches(core: EngineCore) -> list[int]:
    """Runs everything; returns the number of waiting sequences at each step launched ahead."""
    seen = []
    for _ in range(200):
        before = core.ahead.num_ahead
        core.step()
        if core.ahead.num_ahead > before:
            seen.append(len(core.scheduler.waiting))
        if not core.scheduler.requests:
            return seen
    raise AssertionError("a request never ends")


def test_steps_go_ahead_while_places_or_blocks_are_taken() -> None:
    """With four places and six requests of twelve tokens, the last two enter right after the first ones' last step."""
    core = core_that_goes_ahead()
    requests = crowd(core, 6, [1, 2, 4], max_tokens=12)
    assert waiting_at_early_launches(core) == [2] * 11 + [0] * 12
    for request in requests:
        assert [request.output_token_ids] == generate_alone([1, 2, 4], request.sampling)
    # A place is free, but not enough blocks for a third prompt
    core = core_that_goes_ahead()
    crowd(core, 3, list(range(4, 4 + 4 * 14)), max_tokens=6)
    assert waiting_at_early_launches(core)[:2] == [1, 1]


def test_a_request_that_could_be_admitted_is_not_made_to_wait() -> None:
    """A request that arrives during a step is planned right after it."""
    core = core_that_goes_ahead()
    crowd(core, 2, [1, 2, 4], max_tokens=12)
    for _ in range(3):
        core.step()
    late = Request("late", RequestSpec([1, 2], Sampling(max_tokens=2, temperature=0.0)), arrival_s=9.0)
    core.scheduler.add(late)
    assert late not in core.step().plan.admitted
    assert late in core.step().plan.admitted
    assert core.ahead.num_ahead == core.num_steps  # this step, too, was planned before the host saw the last token


ALONE = Sampling(max_tokens=12)
HOST: dict[str, tuple[bool, Sampling, dict[str, Any], Pooling | None]] = {
    "nothing": (False, ALONE, {}, None),
    "it is handed over": (False, ALONE, {"leg": "prefill"}, None),
    "it was forked": (False, Sampling(max_tokens=12, n=2), {"output_token_ids": [5]}, None),
    "a guide": (True, Sampling(max_tokens=12, guide=Guide("regex", "[abc]{9}")), {}, None),
    "beams": (True, Sampling(max_tokens=12, temperature=0.0, beam_width=2), {}, None),
    "several first tokens": (True, Sampling(max_tokens=12, n=2), {}, None),
    "a prompt's logprobs": (True, Sampling(max_tokens=12, prompt_logprobs=1), {}, None),
    "a vector": (True, ALONE, {}, Pooling()),
}


@pytest.mark.parametrize("why", HOST)
def test_requests_that_need_the_host(why: str) -> None:
    """Only requests of these kinds wait for the host."""
    needs, sampling, own, pooling = HOST[why]
    assert needs_host(Request("r", RequestSpec([1, 2, 4], sampling, pooling=pooling), **own)) == needs


def test_beams_wait_for_the_host() -> None:
    core = core_that_goes_ahead()
    run(core, Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, beam_width=2))
    assert core.ahead.num_ahead == 0


def chunks_by_step(core: EngineCore) -> list[list[tuple[str, int]]]:
    steps = []
    for _ in range(400):
        steps.append(sorted((request.key, num_tokens) for request, num_tokens in core.step().plan.chunks))
        if not core.scheduler.requests:
            return steps
    raise AssertionError("a request never ends")


@pytest.mark.parametrize("seed", range(12))
def test_steps_planned_early_are_those_planned_late(seed: int) -> None:
    """If all ends are predictable, each step computes the same tokens of the same requests, including prompts."""
    found = []
    for goes_ahead in (False, True):
        rng = random.Random(seed)
        block_size, num_blocks = rng.choice([1, 2, 4, 7]), rng.randrange(40, 90)
        runner = ToyRunner(num_blocks, block_size)
        runner.goes_ahead = goes_ahead
        prefix = PrefixScope("model", Numerics()) if rng.random() < 0.7 else None
        scheduler = StepScheduler(
            [LayerGroup(BlockPool(num_blocks))],
            StepSizes(block_size, rng.randrange(2, 6), rng.randrange(3, 20)),
            prefix,
        )
        core = EngineCore(runner, scheduler)
        for at in range(12):
            prompt = [1, 2, 4, 5] * rng.randrange(0, 5) + [rng.randrange(30) for _ in range(rng.randrange(1, 9))]
            sampling = Sampling(max_tokens=rng.randrange(1, 9), temperature=0.0, ignore_eos=True)
            scheduler.add(Request(f"r{at}", RequestSpec(prompt, sampling), arrival_s=float(rng.randrange(3))))
        found.append(chunks_by_step(core))
        assert (core.ahead.num_ahead > len(found[-1]) // 3) == goes_ahead
    assert found[0] == found[1]


def test_chunks_of_a_long_prompt_are_computed_ahead_and_may_be_aborted() -> None:
    """Chunks of 32 tokens do not wait for the host beside a decoding sequence; then both sequences decode."""
    core = core_that_goes_ahead()
    short, long = RequestSpec([1, 2, 4], GREEDY), RequestSpec(list(range(4, 36)) * 3, GREEDY)
    requests = [Request("short", short, arrival_s=0.0), Request("long", long, arrival_s=1.0)]
    for request in requests:
        core.scheduler.add(request)
    plans = []
    while core.scheduler.requests:
        plans.append([num_tokens for _, num_tokens in core.step().plan.chunks])
    assert plans[:4] == [[3, 29], [1, 31], [1, 31], [1, 5]]
    assert core.ahead.num_ahead == len(plans) - 1
    for request in requests:
        assert [request.output_token_ids] == generate_alone(request.prompt_token_ids, GREEDY)
    # Its blocks are given to another request, whose tokens are the same as alone
    core = core_that_goes_ahead()
    requests = [Request(name, RequestSpec(list(range(4, 36)) * 3, GREEDY)) for name in ("aborted", "late")]
    core.scheduler.add(requests[0])
    core.step()
    assert core.ahead.num_ahead == 1
    core.scheduler.finish(requests[0])
    core.scheduler.add(requests[1])
    while core.scheduler.requests:
        core.step()
        core.scheduler.check()
    assert [requests[1].output_token_ids] == generate_alone(requests[1].prompt_token_ids, GREEDY)


@pytest.mark.parametrize("num_places", [1, 2])
@pytest.mark.parametrize("aborts", [False, True])
def test_a_leg_that_lacks_pixels_is_reported_whenever_it_enters(num_places: int, aborts: bool) -> None:
    """Covers a leg that enters after an ending sequence, beside a decoding one, and beside an aborted one."""
    core = core_that_goes_ahead(num_places)
    text = Request("text", RequestSpec([1, 2], GREEDY), arrival_s=0.0)
    order = RequestSpec([1, 7, 7, 7, 7, 2, 3], GREEDY, spans=(Span(1, 5, b"d"),), images=(Image(4, 4),))
    lacks = Request("lacks", order, leg="decode", output_token_ids=[5], arrival_s=1.0)
    core.scheduler.add(text)
    reported = list(core.step().plan.lacking)
    core.scheduler.add(lacks)
    reported += core.step().plan.lacking
    if aborts:
        core.scheduler.finish(text)
    while core.scheduler.requests:
        reported += core.step().plan.lacking
    assert reported == [lacks]
    core.scheduler.check()
