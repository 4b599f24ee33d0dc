"""Sampling: fixed random numbers, the sampled distribution, and independence of the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from pd_cluster.model.sampling import sampler
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow, uniform, uniforms
from pd_cluster.model.sampling.token_draw import DrawParameters
from pd_cluster.model.sampling.token_draw import draw as choose
from pd_cluster.types import Request, RequestSpec, Sampling


def sample(logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Samples each row as a separate request without tokens."""
    rows = [
        SamplingRow(Request(str(i), RequestSpec([], p)), 0, position)
        for i, (p, position) in enumerate(zip(params, positions, strict=True))
    ]
    return [s.token_id for s in Sampler(logits.shape[-1], frozenset()).sample(logits.clone(), rows)]


def test_uniform_vectors() -> None:
    """These numbers must be the same on all devices and in all versions, because replay depends on them."""
    assert [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1), uniform(2**63, 0, 5)] == VECTORS
    assert uniforms([0, 1, 0, 0, 2**63], [0, 0, 1, 0, 0], [0, 0, 0, 1, 5]).tolist() == VECTORS


VECTORS = [0.13870941014555427, 0.6935121390102292, 0.2691303195904541, 0.18436667429957676, 0.2344430666745525]


def test_uniform_is_uniform() -> None:
    seeds = [3] * 20_000
    values = uniforms(seeds, [0] * 20_000, range(20_000)).tolist()
    assert values[:500] == [uniform(3, 0, position) for position in range(500)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    counts = Counter(int(value * 10) for value in values)
    assert all(abs(count - 2000) < 200 for count in counts.values())
    for seed in (-1, 2**64 - 1, 2**80 + 5):  # any integer is a valid seed
        assert uniforms([seed], [1], [2]).tolist() == [uniform(seed, 1, 2)]


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities])


def draw(logits: torch.Tensor, params: Sampling, count: int) -> Counter[int]:
    seeds = [msgspec.structs.replace(params, seed=seed) for seed in range(count)]
    return Counter(sample(logits.expand(count, -1), seeds, [0] * count))


def test_greedy_takes_the_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert sample(logits, [Sampling(temperature=0.0)] * 2, [0, 0]) == [1, 0]
    assert sample(torch.empty(0, 5), [], []) == []


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.1]
    counts = draw(logits_of(probabilities), Sampling(), 8000)
    for token, probability in enumerate(probabilities):
        assert abs(counts[token] / 8000 - probability) < 0.02


@pytest.mark.parametrize("params", [Sampling(), Sampling(top_k=500), Sampling(top_p=0.9999999)])
def test_frequencies_over_many_tokens(params: Sampling) -> None:
    """Chi-squared test over 500 tokens in four blocks of the sum: no block and no place in a block is preferred."""
    probabilities = torch.rand(500, generator=torch.Generator().manual_seed(0)) + 0.5
    counts = draw(probabilities.log(), params, 3000)
    expected = probabilities / probabilities.sum() * 3000
    chi_squared = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert abs(chi_squared - 499) < 4 * math.sqrt(2 * 499)


def test_temperature_sharpens() -> None:
    counts = draw(logits_of([0.5, 0.3, 0.2]), Sampling(temperature=0.2), 2000)
    expected = [p**5 for p in (0.5, 0.3, 0.2)]
    assert abs(counts[0] / 2000 - expected[0] / sum(expected)) < 0.03


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30, 1e308])
def test_extreme_temperatures(temperature: float) -> None:
    counts = draw(torch.tensor([1.0, 3.0, -math.inf, 3.0]), Sampling(temperature=temperature), 500)
    assert set(counts) == ({1, 3} if temperature < 1 else {0, 1, 3})


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "allowed"),
    [
        (2, 1.0, 0.0, {0, 1}),
        (-1, 0.6, 0.0, {0, 1}),  # the token that crosses top_p is kept
        (-1, 0.0, 0.0, {0}),  # the best token is always kept
        (0, 1.0, 0.0, {0, 1, 2, 3}),
        (100, 1.0, 0.0, {0, 1, 2, 3}),
        (3, 0.99, 0.0, {0, 1, 2}),
        (2, 0.7, 0.0, {0, 1}),  # top_p applies after top_k
        (-1, 1.0, 0.4, {0, 1}),
        (-1, 1.0, 1.0, {0}),
        (-1, 0.6, 0.45, {0}),  # top_p applies after min_p
        (3, 1.0, 0.25, {0, 1, 2}),
    ],
)
def test_top_k_top_p_and_min_p_cut(top_k: int, top_p: float, min_p: float, allowed: set[int]) -> None:
    params = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(draw(logits_of([0.5, 0.25, 0.15, 0.1]), params, 400)) == allowed


MIXED = [
    Sampling(seed=1),
    Sampling(seed=2, top_k=5),
    Sampling(temperature=0.0),
    Sampling(seed=3, top_p=0.7),
    Sampling(seed=4, top_k=3, top_p=0.5),
    Sampling(seed=5, temperature=3.0),
    Sampling(seed=6, top_k=200),
    Sampling(seed=7, min_p=0.05),
]
POSITIONS = [4, 9, 2, 0, 7, 1, 3, 8]


def test_a_batch_too_large_for_one_pass_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(len(MIXED), 50, generator=torch.Generator().manual_seed(0))
    whole = sample(logits, MIXED, POSITIONS)
    monkeypatch.setattr(sampler, "MAX_LOGITS_AT_ONCE", 150)
    assert sample(logits, MIXED, POSITIONS) == whole


@pytest.mark.parametrize("params", [Sampling(), Sampling(top_k=4), Sampling(top_p=0.9)])
def test_near_ties_in_the_ranking_do_not_change_the_draw(params: Sampling) -> None:
    """If rounding swaps two tokens of almost equal probability, the drawn token must not change."""
    base = torch.tensor([1.0, 0.5, 0.2, 0.2, -1.0])
    swapped = base.clone()
    swapped[2] += 1e-6
    assert draw(base, params, 200) == draw(swapped, params, 200)


@pytest.mark.parametrize("params", MIXED, ids=str)
def test_the_largest_random_number_draws_the_last_token_that_is_left(params: Sampling) -> None:
    """However sums round, no token with probability 0 or outside the vocabulary is drawn."""
    logits = torch.randn(50, 700, generator=torch.Generator().manual_seed(4))
    logits[:, 650:] = -math.inf
    largest = np.full(50, 1 - 2.0**-53)
    drawn = choose(logits, logits.amax(-1).numpy(), DrawParameters.of([params] * 50, largest, 700))
    assert (drawn < 650).all()
    if params == Sampling(seed=1):
        assert (drawn > 640).all()


@pytest.mark.parametrize("params", MIXED, ids=str)
def test_broken_logits_neither_crash_nor_spread(params: Sampling) -> None:
    """NaN and masked tokens are never chosen, +inf always wins, and a row without valid tokens gives token 0."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    healthy = sample(logits[4:], [params], [0])
    logits[0, ::2] = math.nan
    logits[1, 17] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    token_ids = sample(logits, [params] * 5, [0] * 5)
    assert token_ids[0] % 2 == 1
    assert token_ids[1:] == [17, 0, 0, *healthy]
    assert sample(torch.tensor([[math.nan, math.inf, -math.inf]]), [params], [0]) == [1]
    masked = torch.full((300,), -math.inf)
    masked[[7, 130, 299]] = 0.0
    assert set(draw(masked, params, 50)) <= {7, 130, 299}
