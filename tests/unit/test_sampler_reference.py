"""The sampler against a slow reference that handles one row and one operation at a time; logprobs."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
import torch

from pd_cluster.model.sampling import row_passes
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Logprobs, Request, RequestSpec, Sampling
from tests.support.reference_sampler import reference

EOS = frozenset({1, 3})


def random_params(rng: random.Random, vocab_size: int) -> Sampling:
    """Draws parameters; each keeps its default in about half of the cases."""

    def maybe(default: Any, *others: Any) -> Any:
        return default if rng.random() < 0.5 else rng.choice(others)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    return Sampling(
        temperature=maybe(1.0, 0.0, 0.3, 2.5),
        top_k=maybe(-1, 0, 1, 5, 64, 65, 300, vocab_size),
        top_p=maybe(1.0, 0.03, 0.5, 0.9, 0.999),
        min_p=maybe(0.0, 0.013, 0.21),
        seed=rng.getrandbits(64),
        min_tokens=maybe(0, 2, 8),
        stop_token_ids=maybe((), some(2)),
        ignore_eos=maybe(False, True),
        presence_penalty=maybe(0.0, 0.7, -0.5),
        frequency_penalty=maybe(0.0, 0.4, -0.3),
        repetition_penalty=maybe(1.0, 1.3, 0.8),
        logit_bias=maybe((), tuple((token, rng.uniform(-9, 9)) for token in set(some(4)))),
        bad_words=maybe((), tuple(some(rng.randint(1, 3)) for _ in range(5))),
        allowed_token_ids=maybe((), some(1), some(12), tuple(range(0, vocab_size, 2))),
    )


def random_logits(rng: random.Random, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(rng.getrandbits(30)))
    kind = rng.choice(["plain", "peaked", "16 bit", "few values", "masked"])
    if kind == "peaked":
        logits *= 6
    elif kind == "16 bit":
        logits = (logits * 3).bfloat16().float()
    elif kind == "few values":
        logits = logits.round()
    elif kind == "masked":
        logits[logits < 0.3] = -math.inf
    return logits


def random_row(rng: random.Random, vocab_size: int) -> SamplingRow:
    """Draws tokens from few ids, so that bad words occur and counts exceed 1."""
    params = random_params(rng, vocab_size)
    pool = [token for words in params.bad_words for token in words] + [rng.randrange(vocab_size) for _ in range(3)]
    tokens = [rng.choice(pool) for _ in range(30)]
    num_output = rng.randint(0, 10)
    request = Request("r", RequestSpec(tokens[num_output:], params), output_token_ids=tokens[:num_output])
    return SamplingRow(request, rng.randint(0, 3), num_output)


@pytest.mark.parametrize(("vocab_size", "num_cases"), [(5, 100), (40, 150), (300, 60), (2000, 16), (5120, 8)])
def test_equals_the_reference_alone_and_in_a_batch(vocab_size: int, num_cases: int) -> None:
    rng = random.Random(vocab_size)
    sampler = Sampler(vocab_size, EOS)
    rows = [random_row(rng, vocab_size) for _ in range(num_cases)]
    logits = torch.stack([random_logits(rng, vocab_size) for _ in rows])
    expected = [reference(line.numpy(), row, EOS) for line, row in zip(logits, rows, strict=True)]
    together: list[int] = []
    while len(together) < num_cases:
        part = slice(len(together), len(together) + rng.randint(1, 16))
        together += [s.token_id for s in sampler.sample(logits[part].clone(), rows[part])]
    assert together == expected
    alone = [sampler.sample(logits[i : i + 1].clone(), [row])[0].token_id for i, row in enumerate(rows)]
    assert alone == expected


def test_every_path_equals_the_reference() -> None:
    """Covers rows that keep few, many and all tokens, with ties at the limit."""
    logits = torch.randn(4, 5120, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[1].bfloat16().float()
    logits[2] = logits[2].round()
    logits[3, 100:] = -math.inf
    many = {"top_k": 1500}
    cases: list[dict[str, Any]] = [{}, {"top_p": 0.02}, {"top_k": 64}, many, {"top_p": 0.9, "min_p": 0.1}]
    cases += [
        {**many, "top_p": 0.5},
        {**many, "min_p": 0.05},
        {**many, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    ]
    for params in cases:
        rows = [SamplingRow(Request("r", RequestSpec([], Sampling(seed=seed, **params))), 0, 0) for seed in range(4)]
        expected = [reference(line.numpy(), row, EOS) for line, row in zip(logits, rows, strict=True)]
        assert [s.token_id for s in Sampler(5120, EOS).sample(logits.clone(), rows)] == expected


@pytest.mark.parametrize("vocab_size", [40, 300, 5120])
def test_accelerators_choose_the_same(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for logits on a device uses torch's operators, here run on the CPU."""
    rng = random.Random(vocab_size)
    rows = [random_row(rng, vocab_size) for _ in range(64)]
    for row in rows[::2]:
        row.request.sampling = msgspec.structs.replace(row.request.sampling, logprobs=3)
    logits = torch.stack([random_logits(rng, vocab_size) for _ in rows])
    logits[5, ::3] = math.nan
    expected = Sampler(vocab_size, EOS).sample(logits.clone(), rows)
    monkeypatch.setattr(row_passes, "on_host", lambda logits: False)
    assert Sampler(vocab_size, EOS).sample(logits.clone(), rows) == expected


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
    """Logprobs are the model's, unaffected by the adjustments of logits for sampling."""
    logits = logits_with_ties(8, 300)
    rows = [
        SamplingRow(Request("r", RequestSpec([1, 2], Sampling(**p)), output_token_ids=[5, 5, 6]), 0, 3) for p in PARAMS
    ]
    for sampled, line, params in zip(Sampler(300, EOS).sample(logits.clone(), rows), logits, PARAMS, strict=True):
        if "logprobs" in params:
            check(sampled.logprobs, line, sampled.token_id, params["logprobs"])
        else:
            assert sampled.logprobs is None


def test_cutting_off_equal_tokens_does_not_change_what_is_told() -> None:
    request = Request("r", RequestSpec([], Sampling(top_k=100, logprobs=0)))
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
    request = Request("r", RequestSpec([], Sampling(logprobs=1, min_tokens=1, stop_token_ids=(2,))))
    sampled = Sampler(8, EOS).sample(logits, [SamplingRow(request, 0, 0)])
    assert sampled[0][:2] == (2, Logprobs(0.0, 1, [(2, 0.0)]))
