"""Probability masses as integers: the same bits in numpy and torch; top_k and top_p against plain integer sums."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from pd_cluster.model.kernels.fixed_point import MASS_BITS, fixed_masses, share_of, sums_by_bin
from pd_cluster.model.sampling import token_draw as draws
from pd_cluster.model.sampling.device_sampling import draw_shaped
from pd_cluster.model.sampling.row_passes import Floats
from pd_cluster.model.sampling.token_draw import DrawParameters, draw, kept_of
from pd_cluster.types import Sampling


def test_numpy_and_torch_find_the_same_bits_near_the_exact_masses() -> None:
    values = torch.randn(20, 3000, generator=torch.Generator().manual_seed(1)) * 8
    values[:, :5] = torch.tensor([0.0, -0.0, -np.inf, -1e38, 1e-40])
    best, factor = values.amax(1), torch.linspace(0.1, 3.0, 20, dtype=torch.float64)
    by_torch = fixed_masses(values, best, factor)
    by_numpy = fixed_masses(values.numpy(), best.numpy(), factor.numpy())
    assert np.array_equal(by_torch.numpy(), by_numpy)
    exact = ((values.double() - best[:, None].double()) * factor[:, None]).exp() * 2.0**MASS_BITS
    assert ((by_torch - exact).abs() <= 1.0 + exact * 1e-12).all()
    assert (by_torch.amax(1) == 1 << MASS_BITS).all(), "the best token must have mass one"


def test_sums_by_bin_are_exact() -> None:
    rng = random.Random(2)
    masses = np.array([rng.getrandbits(MASS_BITS) for _ in range(5000)] + [1 << MASS_BITS] * 5000)
    bins = np.array([rng.randrange(4) for _ in masses])
    expected = [sum(m for m, b in zip(masses.tolist(), bins.tolist(), strict=True) if b == which) for which in range(4)]
    assert sums_by_bin(bins, masses).tolist() == expected


def kept_by_hand(line: Floats, best: Floats, knobs: DrawParameters) -> tuple[list[int], list[int]]:
    """Returns one row's kept ids, best first, and the masses of all tokens."""
    masses: list[int] = fixed_masses(line[None], best, knobs.inverse_temperature)[0].tolist()
    floor = knobs.floor(best)[0]
    order = sorted((i for i in range(len(line)) if line[i] >= floor), key=lambda i: (-line[i], i))
    order = order[: int(knobs.top_k[0])]
    if knobs.top_p[0] >= 1.0:
        return order, masses
    goal = int(share_of(knobs.top_p, np.array([sum(masses[i] for i in order)]))[0])
    num_kept, reached = 1, masses[order[0]]
    while reached < goal:
        reached += masses[order[num_kept]]
        num_kept += 1
    return order[:num_kept], masses


def drawn_by_hand(kept: list[int], masses: list[int], uniform: float) -> int:
    total = sum(masses[i] for i in kept)
    target, reached = min(int(share_of(uniform, np.array([total]))[0]), total - 1), 0
    for token_id in sorted(kept):
        reached += masses[token_id]
        if reached > target:
            return token_id
    raise AssertionError("the target must be below the total")


@pytest.mark.parametrize(("vocab_size", "spread"), [(30, 2.0), (700, 0.01), (700, 3.0), (5000, 6.0), (20_000, 0.001)])
def test_the_quick_ways_keep_and_draw_what_plain_sums_do(vocab_size: int, spread: float) -> None:
    """Tests shares exactly at sums of masses, one below and one above, so that a sum off by one fails."""
    rng = random.Random(vocab_size)
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    logits[::3] = logits[::3].bfloat16().float()
    best = logits.amax(1).numpy()
    params, shares = [], []
    for row in range(24):
        asked = Sampling(
            top_k=rng.choice([-1, -1, 5, 64, 200]), min_p=rng.choice([0.0, 0.01]), temperature=rng.choice([1.0, 0.6])
        )
        own = DrawParameters.of([asked], np.zeros(1), vocab_size)
        order, masses = kept_by_hand(logits[row].numpy(), best[row : row + 1], own)
        total = sum(masses[i] for i in order)
        reached = sum(masses[i] for i in order[: rng.randrange(1, min(len(order), 60) + 1)])
        shares.append(min(0.9999, max(1e-9, (reached + rng.choice([-1, 0, 1])) / total)))
        params.append(asked)
    knobs = dataclasses.replace(
        DrawParameters.of(params, np.array([rng.random() for _ in params]), vocab_size), top_p=np.array(shares)
    )
    expected = []
    for row in range(24):
        own = knobs.rows(np.array([row]))
        line = logits[row].numpy()
        kept, masses = kept_by_hand(line, best[row : row + 1], own)
        assert kept_of(line, best[row : row + 1], own)[:2] == (line[kept[-1]], len(kept))
        expected.append(drawn_by_hand(kept, masses, float(own.uniform[0])))
    assert draw(logits.clone(), best, knobs).tolist() == expected
    there = {field.name: torch.from_numpy(getattr(knobs, field.name)) for field in dataclasses.fields(knobs)}
    assert draw_shaped(logits, torch.from_numpy(best), logits.argmax(1), there).tolist() == expected


@pytest.mark.parametrize("outlier", [0.0, 9.0])
def test_a_flat_row_is_weighed_once_and_hardly_sorted(outlier: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the bin in which top_p is reached is sorted and weighed again, a small part even of a flat row."""
    nums: list[int] = []

    def counted(values: Floats, *rest: Any) -> Any:
        nums.append(values.size)
        return fixed_masses(values, *rest)

    monkeypatch.setattr(draws, "fixed_masses", counted)
    line = torch.randn(40_000, generator=torch.Generator().manual_seed(4)) * 0.01
    line[7] += outlier
    best = line.amax(0, keepdim=True).numpy()
    token_id = draws.draw_from_many(
        line.numpy(), best, DrawParameters.of([Sampling(top_p=0.9)], np.array([0.5]), len(line))
    )
    assert 0 <= token_id < len(line)
    assert nums[0] == len(line)
    assert sum(nums[1:]) < len(line) / 10


@pytest.mark.parametrize("temperature", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("worst", [-1e-40, -1e-30, -1e30, -3e38, -np.inf])
def test_extreme_logits_and_temperatures(temperature: float, worst: float) -> None:
    line = np.array([0.0, worst, worst / 2, 0.0, worst] * 30, dtype=np.float32)
    best, own = (
        line[:1],
        DrawParameters.of([Sampling(top_p=0.95, temperature=temperature)], np.array([0.99]), len(line)),
    )
    kept, masses = kept_by_hand(line, best, own)
    assert kept_of(line, best, own)[:2] == (line[kept[-1]], len(kept))
    assert draw(torch.from_numpy(line)[None], best, own).tolist() == [drawn_by_hand(kept, masses, 0.99)]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_top_k_counts_masked_tokens(top_p: float) -> None:
    """If a guide leaves three tokens and top_k is 70, masked tokens of the lowest ids are also kept, without mass."""
    line = np.full(400, -np.inf, dtype=np.float32)
    line[[5, 200, 399]] = 1.0, 3.0, 2.0
    best, own = line[200:201], DrawParameters.of([Sampling(top_k=70, top_p=top_p)], np.array([0.99]), len(line))
    kept, masses = kept_by_hand(line, best, own)
    assert len(kept) == (70 if top_p == 1.0 else 2)
    assert kept_of(line, best, own)[:2] == (line[kept[-1]], len(kept))
    assert draw(torch.from_numpy(line)[None], best, own).tolist() == [drawn_by_hand(kept, masses, 0.99)]
