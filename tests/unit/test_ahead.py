"""Who may go on before the host has seen the last token, and who has to wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.engine.ahead import can_go_ahead
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.plan import StepPlan
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.types import Guide, Request, SamplingParams
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
    scheduler = Scheduler(BlockPool(NUM_BLOCKS), BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=32)
    return EngineCore(runner, scheduler)


def run(core: EngineCore, params: SamplingParams) -> None:
    """What comes out is what comes out alone."""
    request = Request("r", [1, 2, 4], params)
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
    run(core, SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True, **asked))
    assert (
        core.ahead.num_ahead == 10
    )  # of twelve tokens: the prompt gives the first, and the second is launched in time


def test_beams_wait_for_the_host() -> None:
    core = core_that_goes_ahead()
    run(core, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, beam_width=2))
    assert core.ahead.num_ahead == 0


@pytest.mark.parametrize("guide", [None, Guide("regex", "[abc]{9}")], ids=["free", "guided"])
def test_guided_sequences_wait_for_the_host(guide: Guide | None) -> None:
    """And only they do."""
    request = Request("r", [1, 2, 4], SamplingParams(max_tokens=12, guide=guide), output_token_ids=[5])
    request.num_computed_tokens = 3
    assert can_go_ahead(StepPlan([(request, 1)])) == (guide is None)
