"""Logits processors with tiny checkpoints give a plain loop's tokens, however the engine is disturbed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM, SamplingParams
from pd_cluster.errors import ConfigError
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Guide, Request, RequestSpec, Resumed, Sampling, resume
from tests.support.checkpoints import reference_model
from tests.support.engines import make_core, random_prompt, run, together
from tests.support.processors import HERE, OnlyOne, rolled, shifted

BY_TOKENS, ROLLING, FAILS = f"{HERE}:ByTokens", f"{HERE}:Rolling", f"{HERE}:Fails"
SMALL: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 128}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def orders_of(num: int, **fields: Any) -> list[RequestSpec]:
    rng = random.Random(4)
    base = {"max_tokens": 30, "ignore_eos": True, **fields}
    return [RequestSpec(random_prompt(rng, 5 + 7 * at % 40), Sampling(seed=at, **base)) for at in range(num)]


@lru_cache
def plain_loop(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Returns the greedy tokens of transformers' model with ByTokens' changes."""
    output: list[int] = []
    for _ in range(max_tokens):
        state = 0
        for token_id in (*prompt, *output):
            state = rolled(state, token_id)
        with torch.inference_mode():
            line = reference_model(folder)(torch.tensor([[*prompt, *output]])).logits[0, -1]
        output.append(int(shifted(line, state).argmax()))
    return tuple(output)


def test_tokens_are_those_of_a_plain_loop(model: Path) -> None:
    core = make_core(model, **SMALL, num_blocks=400, logits_processors=(BY_TOKENS,))
    orders = orders_of(3, temperature=0.0)
    expected = [[*plain_loop(model, tuple(order.prompt_token_ids), 30)] for order in orders]
    assert together(core, orders) == expected
    assert together(core, orders) == expected  # now from the prefix cache
    plain = make_core(model, **SMALL, num_blocks=400)
    assert together(plain, orders) != expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", [BY_TOKENS, ROLLING])
def test_preempted_sequences_continue(model: Path, name: str, mode: str) -> None:
    orders = [*orders_of(4, temperature=1.0, n=2, repetition_penalty=1.2), *orders_of(1, temperature=0.0)]
    wide = make_core(model, **SMALL, num_blocks=600, logits_processors=(name,))
    tight = make_core(
        model, **SMALL, num_blocks=60, preemption_mode=mode, swap_space_gib=0.001, logits_processors=(name,)
    )
    found = [tokens_of(core, orders) for core in (wide, tight)]
    assert found[0] == found[1]
    assert tight.scheduler.num_preemptions > 0
    assert wide.scheduler.num_preemptions == 0


def tokens_of(core: Any, orders: list[RequestSpec]) -> list[dict[int, list[int]]]:
    requests = [Request(f"r{at}", order, arrival_s=float(at)) for at, order in enumerate(orders)]
    found = run(core, requests)
    return [{i: [t.token_id for t in ts] for i, ts in found[each.request_id].items()} for each in requests]


@pytest.mark.parametrize("name", [BY_TOKENS, ROLLING])
def test_a_sequence_resumes_from_its_tokens(model: Path, name: str) -> None:
    core = make_core(model, **SMALL, num_blocks=400, logits_processors=(name,))
    for order in (*orders_of(2, temperature=0.9), *orders_of(1, temperature=0.0)):
        ((whole,),) = ([*each.values()] for each in tokens_of(core, [order]))
        for at in (1, 20):
            first = Request("again", order)
            again = resume(first, Resumed(0, whole[:at]))
            run(core, [again])
            assert again.output_token_ids == whole


def test_beams_and_guides(model: Path) -> None:
    core = make_core(model, **SMALL, num_blocks=400, logits_processors=(ROLLING,))
    plain = make_core(model, **SMALL, num_blocks=400)
    beams = orders_of(2, temperature=0.0, beam_width=3, n=2, max_tokens=8)
    tight = make_core(model, **SMALL, num_blocks=36, logits_processors=(ROLLING,))
    assert tokens_of(core, beams) == tokens_of(tight, beams) != tokens_of(plain, beams)
    guided = orders_of(3, temperature=1.0, guide=Guide("regex", "[a-f]{12}"), ignore_eos=False)
    for order, output in zip(guided, tokens_of(core, guided), strict=True):
        text = Tokenizer(model).decode(output[0], skip_special_tokens=True)
        assert re.fullmatch("[a-f]{12}", text), (order, text)


def test_a_processor_that_fails_ends_its_request_alone(model: Path) -> None:
    core = make_core(model, **SMALL, num_blocks=400, logits_processors=(FAILS, BY_TOKENS))
    orders = orders_of(3, temperature=0.0)
    bad = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True, extra_args=json.dumps({"fails_at": 5}))
    beams = Sampling(max_tokens=9, temperature=0.0, beam_width=2, extra_args=json.dumps({"fails_at": 3}))
    requests = [Request(f"r{at}", order, arrival_s=float(at)) for at, order in enumerate(orders)]
    failing = [Request("bad", RequestSpec([1, 2, 3], bad)), Request("beams", RequestSpec([4, 5], beams))]
    for request in (*requests, *failing):
        core.scheduler.add(request)
    crashed: dict[str, str] = {}
    while core.scheduler.requests:
        for request, why in core.step().crashed:
            crashed[request.request_id] = why
            for each in [r for r in core.scheduler.requests.values() if r.request_id == request.request_id]:
                core.scheduler.finish(each)  # as the worker drops a leg
        core.scheduler.check()
    assert set(crashed) == {"bad", "beams"}
    assert crashed["bad"] == f"logits processor {FAILS}: ZeroDivisionError: at 5"
    assert len(failing[0].output_token_ids) == 5
    for request in requests:
        assert tuple(request.output_token_ids) == plain_loop(model, tuple(request.prompt_token_ids), 30)
    assert core.scheduler.blocks.num_held == 0


def test_requests_with_processors_do_not_draft(model: Path) -> None:
    core = make_core(model, **SMALL, num_blocks=400, logits_processors=(BY_TOKENS,))
    (order,) = orders_of(1, temperature=0.0)
    expected = plain_loop(model, tuple(order.prompt_token_ids), 30)
    predicted = RequestSpec(order.prompt_token_ids, order.sampling, prediction=expected)
    assert together(core, [predicted]) == [[*expected]]
    assert core.drafting.totals.num_draft_tokens == 0
    plain = make_core(model, **SMALL, num_blocks=400)
    (guess,) = together(plain, [order])
    assert together(plain, [RequestSpec(order.prompt_token_ids, order.sampling, prediction=tuple(guess))]) == [guess]
    assert plain.drafting.totals.num_draft_tokens > 0


# ---- LLM


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), num_blocks=64, max_model_len=64, logits_processors=[OnlyOne, FAILS]) as made:
        yield made


def generated(llm: LLM, **params: Any) -> Any:
    fields = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **params}
    (output,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=SamplingParams(**fields), use_tqdm=False)
    return output


def test_llm_takes_classes_and_arguments(llm: LLM) -> None:
    found = generated(llm, extra_args={"target": 65})
    assert list(found.outputs[0].token_ids) == [65] * 5
    assert list(generated(llm).outputs[0].token_ids) != [65] * 5


def test_llm_tells_what_went_wrong(llm: LLM) -> None:
    refused = generated(llm, extra_args={"target": "x"})
    assert refused.error_code == 400
    assert refused.error_msg == f"logits processor {HERE}:OnlyOne: ValueError: target 'x' is not a token id"
    failed = generated(llm, extra_args={"fails_at": 2})
    assert failed.error_code == 500
    assert failed.error_msg.endswith(f"logits processor {FAILS}: ZeroDivisionError: at 2")
    assert list(generated(llm, extra_args={"target": 9}).outputs[0].token_ids) == [9] * 5


def test_a_missing_class_ends_the_start(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"logits_processors .*:Missing: the module .* has no Missing"):
        LLM(str(model), num_blocks=64, max_model_len=64, logits_processors=[f"{HERE}:Missing"])
