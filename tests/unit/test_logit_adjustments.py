"""Masks and penalties equal transformers' processors; the state that they keep never changes a result."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from pd_cluster.model.sampling.logit_adjustments import Adjustment, LogitEdit, adjustment_of, adjustments, apply
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.model.sampling.token_draw import DrawParameters, draw
from pd_cluster.types import Request, RequestSpec, Sampling

VOCAB_SIZE = 50
EOS = frozenset({7, 11})


def adjusted(logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any) -> torch.Tensor:
    """Returns one row of logits [vocab_size] after a request's masks and penalties."""
    request = Request("r", RequestSpec(prompt, Sampling(**params)), output_token_ids=output)
    adjustment = adjustment_of(request, len(logits), EOS)
    work = logits.clone()[None]
    apply(work, [LogitEdit(0, adjustment, adjustment.banned(request, len(output)))])
    return work[0]


def random_case(seed: int) -> tuple[torch.Tensor, list[int], list[int]]:
    rng = random.Random(seed)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    return logits, [rng.randrange(9) for _ in range(rng.randint(1, 9))], [rng.randrange(9) for _ in range(seed % 6)]


BAD_WORDS = ((4,), (0, 1), (2, 3), (5, 6, 7), (1, 1), (8, 0, 2, 5), (12, 13))
BIAS = ((3, 2.5), (9, -4.0), (30, 100.0))
HF: dict[str, tuple[dict[str, Any], Callable[[int], hf.LogitsProcessor]]] = {
    "repetition above": ({"repetition_penalty": 1.7}, lambda _: hf.RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition below": ({"repetition_penalty": 0.6}, lambda _: hf.RepetitionPenaltyLogitsProcessor(0.6)),
    "bad words": ({"bad_words": BAD_WORDS}, lambda _: hf.NoBadWordsLogitsProcessor([list(w) for w in BAD_WORDS])),
    "min tokens": (
        {"min_tokens": 3},
        lambda num_prompt: hf.MinNewTokensLengthLogitsProcessor(num_prompt, 3, sorted(EOS)),
    ),
    "bias": ({"logit_bias": BIAS}, lambda _: hf.SequenceBiasLogitsProcessor([[[token], b] for token, b in BIAS])),
}


@pytest.mark.parametrize("name", HF)
def test_adjusts_as_transformers_does(name: str) -> None:
    params, processor = HF[name]
    changed = 0
    for seed in range(24):
        logits, prompt, output = random_case(seed)
        expected = processor(len(prompt))(torch.tensor([prompt + output]), logits.clone()[None])[0]
        assert torch.equal(adjusted(logits, prompt, output, **params), expected)
        changed += not torch.equal(expected, logits)
    assert changed > 8


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.6}, [hf.TemperatureLogitsWarper(0.6)]),
        ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
        ({"temperature": 1.5, "min_p": 0.02}, [hf.TemperatureLogitsWarper(1.5), hf.MinPLogitsWarper(0.02)]),
        (
            {"temperature": 2.0, "top_k": 20, "top_p": 0.7},
            [hf.TemperatureLogitsWarper(2.0), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.7)],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_draws_from_the_distribution_of_transformers(params: dict[str, Any], warpers: list[hf.LogitsProcessor]) -> None:
    """Evenly spaced numbers instead of random ones draw each token in proportion to its probability."""
    num_draws = 2000
    even = (np.arange(num_draws) + 0.5) / num_draws
    knobs = DrawParameters.of([Sampling(**params)] * num_draws, even, VOCAB_SIZE)
    for seed in range(3):
        logits = random_case(seed)[0]
        scores = logits[None]
        for warper in warpers:
            scores = warper(torch.empty(1, 0, dtype=torch.long), scores)
        expected = scores.softmax(-1)[0] * num_draws
        drawn = draw(logits.expand(num_draws, -1).contiguous(), np.full(num_draws, logits.max()), knobs)
        counts = torch.from_numpy(np.bincount(drawn, minlength=VOCAB_SIZE))
        assert (counts - expected).abs().max() < 1.01
        assert not counts[expected == 0].any()


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    params = {
        "logit_bias": ((-1, 5.0), (50, 5.0)),
        "bad_words": ((99,), (-2,), (1, 77)),
        "stop_token_ids": (1000,),
        "min_tokens": 9,
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.0,
    }
    after = adjusted(torch.ones(VOCAB_SIZE), [60, 1], [70, -3, 1], **params)
    changed = torch.nonzero(after != 1.0).flatten().tolist()
    assert changed == [1, 7, 11]
    assert after[1].item() == -0.5


GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("params", "token_id"),
    [
        ({"bad_words": tuple((i,) for i in range(4))}, 2),  # the likeliest token, as without masks
        ({"allowed_token_ids": (0, 3), "bad_words": ((0,), (3,))}, 3),  # the likeliest allowed token
        ({"allowed_token_ids": (99,)}, 2),
        ({"logit_bias": tuple((i, -math.inf) for i in range(4))}, 2),
    ],
)
def test_where_nothing_is_left_a_token_is_chosen_all_the_same(params: dict[str, Any], token_id: int) -> None:
    for temperature in (0.0, 1.0):
        logits = torch.tensor([[1.0, 2.0, 4.0, 3.0], [5.0, 0.0, 0.0, 0.0]])
        blocked = Request("r", RequestSpec([], Sampling(temperature=temperature, **params)))
        plain = Request("s", RequestSpec([], Sampling(**GREEDY)))
        sampled = Sampler(4, frozenset()).sample(logits, [SamplingRow(blocked, 0, 0), SamplingRow(plain, 0, 0)])
        assert [s.token_id for s in sampled] == [token_id, 0]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 0.0, "presence_penalty": math.inf, "frequency_penalty": -math.inf},
        {"logit_bias": ((1, math.inf), (2, math.nan)), "repetition_penalty": math.nan},
        {"allowed_token_ids": (0, 1), "logit_bias": ((2, math.inf),)},
        {"temperature": -1.0, "min_p": 3.0},
        {"temperature": math.nan},
        {"top_p": math.nan},
        {"top_p": -1.0, "top_k": -7},
        {"min_p": math.nan, "top_k": 5, "bad_words": ((),)},
    ],
    ids=str,
)
def test_senseless_parameters_do_not_crash(params: dict[str, Any]) -> None:
    request = Request("r", RequestSpec([1, 2], Sampling(**params)), output_token_ids=[2, 0])
    sampled = Sampler(40, EOS).sample(random_case(1)[0][None, :40], [SamplingRow(request, 0, 2)])
    assert 0 <= sampled[0].token_id < 40


EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 5,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "bad_words": ((1, 2), (3, 4), (5,), (2, 1, 0)),
    "min_tokens": 20,
    "logit_bias": ((3, 1.0), (4, 1.0)),
}


def generate(request: Request, num_tokens: int, sampler: Sampler) -> None:
    """Generates tokens from logits that are a function of the position."""
    while len(request.output_token_ids) < num_tokens:
        position = len(request.output_token_ids)
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(position))
        request.output_token_ids.append(sampler.sample(logits, [SamplingRow(request, 0, position)])[0].token_id)


def test_replay_with_or_without_state_gives_the_same_tokens() -> None:
    sampler, order = Sampler(VOCAB_SIZE, EOS), RequestSpec([1, 2, 3, 49], Sampling(**EVERYTHING))
    whole = Request("r", order)
    generate(whole, 60, sampler)
    assert len(set(whole.output_token_ids)) > 20
    for cut in (1, 17):
        dropped = Request("r", order)
        generate(dropped, cut, sampler)
        del adjustments[dropped]
        elsewhere = Request("r", order, output_token_ids=whole.output_token_ids[:cut])
        for request in (dropped, elsewhere):
            generate(request, 60, Sampler(VOCAB_SIZE, EOS))
            assert request.output_token_ids == whole.output_token_ids


def test_state_follows_whatever_becomes_of_the_output() -> None:
    """Counts equal those from scratch when tokens are added singly or together, removed, or replaced."""
    rng = random.Random(0)
    request = Request("r", RequestSpec([0, 1, 1, 40], Sampling(repetition_penalty=1.1)))
    for _ in range(600):
        event = rng.random()
        if event < 0.7:
            request.output_token_ids += [rng.randrange(VOCAB_SIZE * 3) for _ in range(rng.choice([1, 1, 1, 30]))]
        elif event < 0.8:
            del request.output_token_ids[rng.randint(0, len(request.output_token_ids)) :]
        elif event < 0.85 and request.output_token_ids:
            request.output_token_ids[-1] = rng.randrange(VOCAB_SIZE)
        elif event < 0.9:
            request.output_token_ids = [rng.randrange(VOCAB_SIZE) for _ in request.output_token_ids]
        state = adjustment_of(request, VOCAB_SIZE * 2, EOS)
        counts = dict(zip(state.penalized.tolist(), state.counts.tolist(), strict=True))
        expected = dict.fromkeys(request.prompt_token_ids, 0) | Counter(request.output_token_ids)
        assert counts == {token: count for token, count in expected.items() if token < VOCAB_SIZE * 2}


def test_forks_share_the_tokens_but_not_the_numbers() -> None:
    """n rows of one request equal n separate requests, also after their state was copied."""
    sampler = Sampler(VOCAB_SIZE, EOS)
    parent = Request("r", RequestSpec([1, 2, 3], Sampling(**EVERYTHING)))
    logits = random_case(3)[0].expand(8, -1)
    forked = sampler.sample(logits.clone(), [SamplingRow(parent, index, 0) for index in range(8)])
    apart = [Request("r", RequestSpec([1, 2, 3], Sampling(**EVERYTHING)), index=index) for index in range(8)]
    assert forked == sampler.sample(logits.clone(), [SamplingRow(r, r.index, 0) for r in apart])
    assert len({s.token_id for s in forked}) > 2
    children = [replace(parent, index=i, output_token_ids=[s.token_id]) for i, s in enumerate(forked)]
    for request, child in zip(apart, children, strict=True):
        request.output_token_ids = list(child.output_token_ids)
    rows = [SamplingRow(child, child.index, 1) for child in children]
    assert sampler.sample(logits.clone(), rows) == sampler.sample(
        logits.clone(), [SamplingRow(r, r.index, 1) for r in apart]
    )


def test_rows_without_masks_or_penalties_keep_no_state_and_that_of_other_parameters_is_not_used() -> None:
    request = Request("r", RequestSpec([1], Sampling(top_k=3)))
    Sampler(VOCAB_SIZE, EOS).sample(random_case(0)[0][None], [SamplingRow(request, 0, 0)])
    assert request not in adjustments
    request = Request("r", RequestSpec([1], Sampling(allowed_token_ids=(3,), **GREEDY)))
    adjustments[request] = Adjustment(Sampling(allowed_token_ids=(4,)), VOCAB_SIZE, EOS)
    assert Sampler(VOCAB_SIZE, EOS).sample(random_case(0)[0][None], [SamplingRow(request, 0, 0)])[0].token_id == 3
