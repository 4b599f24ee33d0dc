"""Log-probabilities: against log_softmax, with ties, and always of the model's own logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Logprobs, Order, Request, Sampling

EOS: frozenset[int] = frozenset()


def expected(line: torch.Tensor, token_id: int, num_top: int) -> tuple[float, int, list[tuple[int, float]]]:
    logprobs, values = line.double().log_softmax(-1).tolist(), line.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    rank = 1 + sum(value > values[token_id] for value in values)
    return logprobs[token_id], rank, [(token, logprobs[token]) for token in order[:num_top]]


def check(told: Logprobs | None, line: torch.Tensor, token_id: int, num_top: int) -> None:
    assert told is not None
    logprob, rank, top = expected(line, token_id, num_top)
    assert told.logprob == pytest.approx(logprob, abs=1e-5)
    assert told.rank == rank
    assert [token for token, _ in told.top] == [token for token, _ in top]
    assert [value for _, value in told.top] == pytest.approx([value for _, value in top], abs=1e-5)


def logits_with_ties(num_rows: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[0::3] = logits[0::3].round()
    logits[1::3] = logits[1::3].bfloat16().float()
    return logits


@pytest.mark.parametrize("vocab_size", [5, 33, 2000, 6400])
def test_prompt_logprobs(vocab_size: int) -> None:
    logits = logits_with_ties(6, vocab_size)
    logits[2, 4:] = -math.inf
    targets = [3, 0, 1, 4, 2, 3]
    for num_top in (0, 1, 40) if vocab_size < 100 else (7,):
        told = Sampler(vocab_size, EOS).prompt_logprobs(logits.clone(), targets, num_top)
        for entry, line, target in zip(told, logits, targets, strict=True):
            check(entry, line, target, num_top)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.5, "logprobs": 0},
    {"top_k": 5, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 6, "repetition_penalty": 3.0, "frequency_penalty": 2.0},
    {"logprobs": 2, "allowed_token_ids": (1, 2, 3)},
    {"top_p": 0.5},
    {"logprobs": 500, "bad_words": ((0,),)},
    {"temperature": 0.0, "logprobs": 4},
]


def test_sampled_tokens_in_a_mixed_batch() -> None:
    """Logprobs are the model's own, whatever was done to the logits to choose the token."""
    logits = logits_with_ties(8, 300)
    rows = [SamplingRow(Request("r", Order([1, 2], Sampling(**p)), output_token_ids=[5, 5, 6]), 0, 3) for p in PARAMS]
    for sampled, line, params in zip(Sampler(300, EOS).sample(logits.clone(), rows), logits, PARAMS, strict=True):
        if "logprobs" in params:
            check(sampled.logprobs, line, sampled.token_id, params["logprobs"])
        else:
            assert sampled.logprobs is None


def test_cutting_off_equal_tokens_does_not_change_what_is_told() -> None:
    request = Request("r", Order([], Sampling(top_k=100, logprobs=0)))
    told = Sampler(2000, EOS).sample(torch.zeros(1, 2000), [SamplingRow(request, 0, 0)])[0].logprobs
    assert told == Logprobs(pytest.approx(-math.log(2000)), 1, [])


def test_broken_logits_have_logprobs_without_nan() -> None:
    logits = torch.zeros(4, 40)
    logits[0, 3:] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    told = Sampler(40, EOS).prompt_logprobs(logits, [5, 5, 0, 1], 2)
    assert [entry.logprob for entry in told] == [-math.inf, 0.0, 0.0, pytest.approx(-math.log(40))]
    assert [entry.rank for entry in told] == [4, 1, 1, 1]
    assert not any(math.isnan(value) for entry in told for _, value in entry.top)


def test_logits_of_inference_mode_are_mended_outside_of_it() -> None:
    with torch.inference_mode():
        logits = torch.full((1, 8), math.nan)
        logits[0, 2] = 0.0
    request = Request("r", Order([], Sampling(logprobs=1, min_tokens=1, stop_token_ids=(2,))))
    sampled = Sampler(8, EOS).sample(logits, [SamplingRow(request, 0, 0)])
    assert sampled[0] == (2, Logprobs(0.0, 1, [(2, 0.0)]))
