"""Sampling with top_k and top_p under Triton's interpreter: exactly the host's tokens and thresholds.

On a GPU, if there is one: `python -m pytest tests/support/cuda_*_cases.py`.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from pd_cluster.model.kernels.cuda.sampling.argmax import argmax_rows
from pd_cluster.model.kernels.cuda.sampling.triton_draw import DrawnTokens, draw_rows
from pd_cluster.model.sampling.device_sampling import draw_shaped
from pd_cluster.model.sampling.row_passes import mended
from pd_cluster.model.sampling.token_draw import DrawParameters, draw, kept_of
from pd_cluster.types import Sampling
from tests.support.interpreted import DTYPES, SLOW_IF_INTERPRETED, choose_device, strided

choose_device()

LARGEST_UNIFORM = 1 - 2.0**-53


def random_params(rng: random.Random, vocab_size: int) -> Sampling:
    return Sampling(
        temperature=rng.choice([1.0, 1.0, 0.1, 0.7, 2.5, 1e-9, 100.0, 1e9]),
        top_k=rng.choice([-1, -1, 1, 2, 20, 64, 65, 80, 300, vocab_size - 1, vocab_size]),
        top_p=rng.choice([1.0, 0.9, 0.95, 0.5, 0.01, 0.999, 0.99999999, 0.0, rng.random()]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
    )


def random_logits(rng: random.Random, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    line = torch.randn(vocab_size)
    kind = rng.choice(["flat", "usual", "peaked", "few values", "equal", "masked", "shifted", "zeros", "one"])
    if kind == "usual":
        line *= 3
    elif kind == "peaked":
        line *= 12
    elif kind == "few values":
        line = line.round()
    elif kind == "equal":
        line = torch.full_like(line, rng.choice([0.0, -7.5, 3.0]))
    elif kind == "masked":
        line[torch.rand(vocab_size) < 0.95] = -math.inf
    elif kind == "shifted":
        line = line * 5 - 1000
    elif kind == "zeros":
        line = torch.where(torch.rand(vocab_size) < 0.5, 0.0, -0.0)
    elif kind == "one":
        line = torch.full_like(line, -math.inf)
    line[rng.randrange(vocab_size)] = rng.choice([0.0, 5.0, -1.0])
    return line.to(dtype)


def drawn_there(logits: torch.Tensor, knobs: DrawParameters, rows: list[int]) -> DrawnTokens:
    found = argmax_rows(logits)
    there = {name: torch.from_numpy(array).to(logits.device) for name, array in fields(knobs).items()}
    return draw_rows(logits, torch.tensor(rows), found.logits, found.token_ids, there)


def fields(knobs: DrawParameters) -> dict[str, Any]:
    return {field.name: getattr(knobs, field.name) for field in dataclasses.fields(knobs)}


def check(logits: torch.Tensor, params: list[Sampling], uniforms: list[float]) -> None:
    """Compares each row with the host's code, and with the torch code for devices without Triton."""
    vocab_size = logits.shape[1]
    knobs = DrawParameters.of(params, np.array(uniforms), vocab_size)
    actual = drawn_there(logits, knobs, list(range(len(logits))))
    host = mended(logits).cpu()
    best = host.amax(1).numpy()
    worst, nums_kept = actual.worst.cpu().numpy(), actual.nums_kept.tolist()
    for row, line in enumerate(host.numpy()):
        expected = kept_of(line, best[row : row + 1], knobs.rows(np.array([row])))[:2]
        assert (worst[row], nums_kept[row]) == expected, (row, params[row])
    assert actual.token_ids.tolist() == draw(host.clone(), best, knobs).tolist()
    there = {name: torch.from_numpy(array) for name, array in fields(knobs).items()}
    by_torch = draw_shaped(host, torch.from_numpy(best), host.argmax(1), there)
    assert actual.token_ids.tolist() == by_torch.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [
        (2, 8),
        (90, 10),
        (5000, 4),
        *(pytest.param(*each, marks=SLOW_IF_INTERPRETED) for each in ((1000, 16), (9001, 8))),
    ],
)
def test_the_same_tokens_are_kept_and_drawn(vocab_size: int, num_rows: int) -> None:
    rng = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    dtype = rng.choice(DTYPES)
    logits = strided(torch.stack([random_logits(rng, vocab_size, dtype) for _ in range(num_rows)]))
    params = [random_params(rng, vocab_size) for _ in range(num_rows)]
    check(logits, params, [rng.choice([rng.random(), 0.0, LARGEST_UNIFORM]) for _ in params])


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"top_p": 0.9}, marks=SLOW_IF_INTERPRETED),
        pytest.param({"top_k": 50, "top_p": 0.95}, marks=SLOW_IF_INTERPRETED),
    ],
    ids=str,
)
def test_a_wide_vocabulary(asked: dict[str, Any]) -> None:
    torch.manual_seed(7)
    logits = (torch.randn(1, 151_936) * 3).bfloat16()
    check(logits, [Sampling(**asked)], [LARGEST_UNIFORM])


@pytest.mark.parametrize("vocab_size", [pytest.param(262_144, marks=SLOW_IF_INTERPRETED), 32_768])
def test_a_wide_vocabulary_of_equals(vocab_size: int) -> None:
    """Among equal logits, top_p keeps exactly as many ids as it allows, the lowest; the last of them can be drawn."""
    logits = torch.full((1, vocab_size), 2.0)
    knobs = DrawParameters.of([Sampling(top_p=0.25)], np.full(1, LARGEST_UNIFORM), vocab_size)
    actual = drawn_there(logits, knobs, [0])
    assert actual.nums_kept.tolist() == [vocab_size // 4]
    assert actual.token_ids.tolist() == [vocab_size // 4 - 1]


def test_neighbours_a_bit_apart_are_told_apart() -> None:
    """The threshold lies between two adjacent float32 numbers, near zero and elsewhere."""
    for base in (0.0, 1.0, -3.0, 1e-38):
        line = [torch.tensor(base)]
        for _ in range(40):
            line.append(torch.nextafter(line[-1], torch.tensor(-math.inf)))
        logits = torch.stack(line)[torch.randperm(41, generator=torch.Generator(device=line[0].device))][None]
        for top_k in (1, 7, 40):
            check(logits, [Sampling(top_k=top_k)], [LARGEST_UNIFORM])
        check(logits, [Sampling(top_p=0.37)], [0.999])


def test_what_is_not_finite() -> None:
    nan, inf = math.nan, math.inf
    torch.manual_seed(8)
    logits = torch.randn(6, 3000).bfloat16()
    logits[0, ::2] = nan
    logits[1, [4, 2047]] = inf
    logits[2, 1:] = -inf
    logits[3, :2999] = nan
    logits[4, 5], logits[4, 6] = torch.finfo(logits.dtype).max, inf
    params = [Sampling(top_p=0.9), Sampling(top_k=3), Sampling(top_k=1, top_p=0.5)] * 2
    check(logits, params, [0.7] * 6)


def test_rows_without_candidates_get_the_best_id_and_others_are_left_alone() -> None:
    torch.manual_seed(9)
    logits = torch.randn(4, 500)
    logits[1], logits[2] = -math.inf, math.nan
    knobs = DrawParameters.of([Sampling(top_p=0.9)] * 3, np.full(3, 0.5), 500)
    alone = drawn_there(logits[3:], knobs.rows(np.array([0])), [0])
    actual = drawn_there(logits, knobs, [1, 3, 2])
    assert actual.token_ids.tolist() == [0, alone.token_ids.item(), 0]
    assert drawn_there(logits, knobs.rows(np.array([], dtype=np.int64)), []).token_ids.shape == (0,)


def test_rows_of_masked_tokens_get_the_best_id_whatever_limits_them() -> None:
    """The caller gives the best id of such a row: the likeliest of its allowed tokens."""
    logits = torch.full((4, 500), -math.inf)
    params = [Sampling(top_k=5), Sampling(top_k=5, top_p=0.5), Sampling(top_p=0.5), Sampling(top_k=5, min_p=0.1)]
    knobs = {
        name: torch.tensor(array) for name, array in fields(DrawParameters.of(params, np.full(4, 0.5), 500)).items()
    }
    best_ids, best = torch.tensor([7, 400, 0, 499]), torch.zeros(4)
    assert draw_rows(logits, torch.arange(4), best, best_ids, knobs).token_ids.tolist() == best_ids.tolist()
    assert draw_shaped(logits, best, best_ids, knobs).tolist() == best_ids.tolist()
