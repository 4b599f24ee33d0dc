"""Continuations of beams from rows of logits, against a sort of the whole vocabulary."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Candidate, Request, RequestSpec, Sampling

EOS = frozenset({3, 17})


def row_for(**fields: Any) -> SamplingRow:
    params = Sampling(**{"n": 2, "beam_width": 3, "temperature": 0.0, "max_tokens": 9, **fields})
    return SamplingRow(Request("r", RequestSpec([5, 6], params), output_token_ids=[9]), 0, 1)


def ends_of(row: SamplingRow) -> set[int]:
    params = row.request.sampling
    return {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}


def expected(logits: torch.Tensor, row: SamplingRow) -> list[tuple[int, float, bool]]:
    """Returns the `beam_width` best of all tokens and of those that do not end; equal ones by lowest id."""
    width, ends = row.request.sampling.beam_width, ends_of(row)
    values = logits.double().log_softmax(-1).tolist()
    ranked = sorted((-value, token) for token, value in enumerate(values) if value > -math.inf)
    others = [each for each in ranked if each[1] not in ends][:width]
    ending = [each for each in ranked if each[1] in ends][:width]
    return [(token, -negated, token in ends) for negated, token in sorted(others + ending)]


def same(found: list[Candidate], wanted: list[tuple[int, float, bool]]) -> bool:
    told = [(candidate.token_id, candidate.ends) for candidate in found]
    close = all(abs(c.logprob - w[1]) < 1e-5 for c, w in zip(found, wanted, strict=False))
    return told == [(token, ends) for token, _, ends in wanted] and close


@pytest.mark.parametrize("vocab_size", [20, 4096 + 7, 8192])
def test_the_best_and_the_best_that_go_on(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    sampler = Sampler(vocab_size, EOS)
    rows = [
        row_for(
            beam_width=rng.randrange(2, 7),
            stop_token_ids=tuple(rng.sample(range(vocab_size), rng.choice([0, 1, 12]))),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(12)
    ]
    logits = torch.randn(len(rows), vocab_size) * 3
    logits[4:8] = logits[4:8].round()  # makes many logits equal
    at = [rng.randrange(len(rows)) for _ in rows]
    kept = logits.clone()
    for found, row, i in zip(sampler.candidates(logits, rows, at), rows, at, strict=True):
        assert same(found, expected(kept[i], row))
    assert torch.equal(logits, kept)


def test_masks_come_before_the_choice_and_clients_see_the_models_own_logits() -> None:
    sampler = Sampler(20, EOS)
    logits = torch.arange(20.0)[None] / 4
    (found,) = sampler.candidates(logits, [row_for(allowed_token_ids=(1, 2), ignore_eos=True)], [0])
    assert same(found, [(2, -math.log1p(math.exp(-0.25)), False), (1, -math.log1p(math.exp(0.25)), False)])
    (found,) = sampler.candidates(logits, [row_for(min_tokens=5)], [0])
    assert not {3, 17} & {candidate.token_id for candidate in found}
    (found,) = sampler.candidates(logits, [row_for(logit_bias=((3, 50.0),))], [0])
    assert (found[0].token_id, found[0].ends) == (3, True)
    (found,) = sampler.candidates(logits, [row_for(allowed_token_ids=(4,), bad_words=((4,),))], [0])
    assert [candidate.token_id for candidate in found] == [4], "if all are forbidden, expected an allowed token"
    logits[0, 5] = math.nan
    (found,) = sampler.candidates(logits, [row_for()], [0])
    assert len(found) == 5
    assert 5 not in {candidate.token_id for candidate in found}
    sampler = Sampler(320, EOS)
    torch.manual_seed(1)
    logits = torch.randn(2, 320)
    rows = [row_for(logprobs=2, logit_bias=((9, 30.0),)), row_for()]
    told, untold = sampler.candidates(logits, rows, [1, 0])
    values = logits[1].double().log_softmax(-1)
    assert told[0].token_id == 9
    assert all(candidate.told is None for candidate in untold)
    for candidate in told:
        assert candidate.told is not None
        assert candidate.told.logprob == pytest.approx(float(values[candidate.token_id]), abs=1e-5)
        assert candidate.told.rank == 1 + int((values > values[candidate.token_id]).sum())
        assert [token for token, _ in candidate.told.top] == values.topk(2).indices.tolist()
