"""What a device chooses by itself is what the host would have chosen."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pd_cluster.device import CPU
from pd_cluster.model import choice
from pd_cluster.model.choice import choose
from pd_cluster.model.sampler import Row, Sampler
from pd_cluster.types import Request, SamplingParams


def sequences(rng: random.Random, num: int) -> list[Request]:
    found = []
    for i in range(num):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
            top_k=rng.choice([-1, -1, 1, 3, 50, 200, 3000]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6]),
            seed=rng.randrange(1 << 40),
        )
        output = [1] * rng.randrange(1, 9)
        found.append(Request(str(i), [1], params, index=rng.randrange(3), output_token_ids=output))
    return found


@pytest.mark.parametrize("vocab_size", [5, 128, 1000, 4099])
@pytest.mark.parametrize("num_unknown", [0, 1])
def test_the_device_draws_what_the_host_draws(vocab_size: int, num_unknown: int) -> None:
    rng = random.Random(vocab_size)
    sampler = Sampler(vocab_size, frozenset({0}))
    for seed in range(30):
        torch.manual_seed(seed)
        requests = sequences(rng, 12)
        logits = torch.randn(12, vocab_size) * rng.choice([0.5, 3.0, 20.0])
        if seed % 3 == 0:
            logits = logits.round()  # many are equal
        chosen = choose(logits.clone(), requests, num_unknown, CPU).tolist()
        rows = [Row(r, r.index, len(r.output_token_ids) + num_unknown) for r in requests]
        assert chosen == [each.token_id for each in sampler.sample(logits, rows)]


def test_logits_that_no_distribution_follows_from() -> None:
    logits = torch.zeros(4, 300)
    logits[0, 7] = math.nan
    logits[1, 9] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    drawn = [Request(str(i), [1], SamplingParams(temperature=1.0, seed=i), output_token_ids=[1]) for i in range(4)]
    chosen = choose(logits.clone(), drawn, 0, CPU).tolist()
    assert chosen[0] != 7
    assert chosen[1:] == [9, 0, 0]
    greedy = [Request(str(i), [1], SamplingParams(temperature=0.0), output_token_ids=[1]) for i in range(4)]
    assert choose(logits.clone(), greedy, 0, CPU).tolist() == [0, 9, 0, 0]


def test_in_sixteen_bits_the_draw_is_that_of_the_same_numbers() -> None:
    torch.manual_seed(3)
    logits = torch.randn(8, 640).bfloat16()
    requests = sequences(random.Random(3), 8)
    assert choose(logits, requests, 0, CPU).tolist() == choose(logits.float(), requests, 0, CPU).tolist()


def test_rows_are_sorted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = sequences(random.Random(9), 20)
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    whole = choose(logits, requests, 0, CPU).tolist()
    monkeypatch.setattr(choice, "MAX_SORTED", 700)
    assert choose(logits, requests, 0, CPU).tolist() == whole
