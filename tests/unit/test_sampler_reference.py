"""The sampler against a slow one that does one row and one step after another, over random parameters."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
import torch

from pd_cluster.model.sampling import passes
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Order, Request, Sampling
from tests.support.reference_sampler import reference

EOS = frozenset({1, 3})


def random_params(rng: random.Random, vocab_size: int) -> Sampling:
    """Each parameter is left alone in about half of the cases."""

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
    """Tokens come from few ids, so that bad words are met and counts exceed 1."""
    params = random_params(rng, vocab_size)
    pool = [token for words in params.bad_words for token in words] + [rng.randrange(vocab_size) for _ in range(3)]
    tokens = [rng.choice(pool) for _ in range(30)]
    num_output = rng.randint(0, 10)
    request = Request("r", Order(tokens[num_output:], params), output_token_ids=tokens[:num_output])
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
    """Rows that keep few, many and all tokens, with ties on the edge."""
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
        rows = [SamplingRow(Request("r", Order([], Sampling(seed=seed, **params))), 0, 0) for seed in range(4)]
        expected = [reference(line.numpy(), row, EOS) for line, row in zip(logits, rows, strict=True)]
        assert [s.token_id for s in Sampler(5120, EOS).sample(logits.clone(), rows)] == expected


@pytest.mark.parametrize("vocab_size", [40, 300, 5120])
def test_accelerators_choose_the_same(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for logits that numpy cannot read uses torch's own operators, which this test runs on the CPU."""
    rng = random.Random(vocab_size)
    rows = [random_row(rng, vocab_size) for _ in range(64)]
    for row in rows[::2]:
        row.request.sampling = msgspec.structs.replace(row.request.sampling, logprobs=3)
    logits = torch.stack([random_logits(rng, vocab_size) for _ in rows])
    logits[5, ::3] = math.nan
    expected = Sampler(vocab_size, EOS).sample(logits.clone(), rows)
    monkeypatch.setattr(passes, "on_host", lambda logits: False)
    assert Sampler(vocab_size, EOS).sample(logits.clone(), rows) == expected
