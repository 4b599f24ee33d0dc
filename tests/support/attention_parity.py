"""Reference attention over a pool of blocks in float64, contents that expose faults, and errors relative to a bound.

Each sequence has needles: keys at its first, its last and some other positions, which look like its queries and share
about half of the weight. So one block that is dropped, taken twice or looked up wrongly moves the result by several
percent, while sums over random keys alone would hide it below the precision of 16 bits. The error is measured against a
bound that follows from the precision: weights and the result are rounded once each, and sums are kept in float32.
Knows nothing of kernels or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pd_cluster.kv.kv_pool import TORCH_DTYPES
from pd_cluster.model.layers.attention.sdpa import Scoring

NUM_NEEDLES = 8
EDGE = 256  # positions around its multiples are needles: kernels divide contexts there
FLOAT32_SLACK = 2.0**-12  # error of exp2, of the sums and of the product with the softcap


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """`sequences`: (query_len, context_len). `is_far`: blocks lie so far apart that offsets need more than 32 bits.

    `device`: torch's name of the device that holds the contents.
    """

    sequences: list[tuple[int, int]]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_far: bool = False
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


@dataclass(slots=True)
class Tensors:
    """One sequence's query, keys and values, in the pool's precision."""

    query: torch.Tensor  # [query_len, num_heads, head_dim]
    keys: torch.Tensor  # [context_len, num_kv_heads, head_dim]
    values: torch.Tensor
    table: torch.Tensor  # [num_blocks] int64


def content_of(
    case: AttentionCase, query_len: int, context_len: int, table: torch.Tensor, generator: torch.Generator
) -> Tensors:
    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=case.device)

    direction = randn(case.num_kv_heads, case.head_dim)
    direction *= case.head_dim**0.5 / direction.norm(dim=-1, keepdim=True)
    query = direction.repeat_interleave(case.num_heads // case.num_kv_heads, 0) + randn(
        query_len, case.num_heads, case.head_dim
    )
    keys, values = (randn(context_len, case.num_kv_heads, case.head_dim) for _ in range(2))
    num_visible = min(context_len, case.window or context_len)
    strength = (math.log(max(1.0, num_visible / NUM_NEEDLES)) + 2) / case.head_dim**0.5
    keys[needles(context_len, query_len, case.window)] = strength * direction
    query, keys, values = (each.to(case.torch_dtype) for each in (query, keys, values))
    return Tensors(query, keys, values, table)


def needles(context_len: int, query_len: int, window: int | None) -> list[int]:
    """Returns the needles' positions: both ends of the visible range, the edges of splits, and some in between."""
    first = max(0, context_len - window) if window else 0
    some = np.random.default_rng(context_len).integers(first, context_len, NUM_NEEDLES - 5).tolist()
    edges = [EDGE - 1, EDGE, first, max(first, context_len - query_len), context_len - 1]
    return sorted({each for each in (*edges, *some) if first <= each < context_len})


def reference(case: AttentionCase, content: Tensors, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float64 [query_len, num_heads, head_dim]: the result, and the weighted mean of value magnitudes."""
    query_len, context_len = len(content.query), len(content.keys)
    at = torch.arange(context_len, device=case.device)
    positions = at[context_len - query_len :, None]
    visible = at <= positions
    if case.window:
        visible &= at > positions - case.window
    group = case.num_heads // case.num_kv_heads
    found, weighed = (torch.empty(content.query.shape, dtype=torch.float64, device=case.device) for _ in range(2))
    for head in range(case.num_heads):
        keys, values = (each[:, head // group].double() for each in (content.keys, content.values))
        scores = content.query[:, head].double() @ keys.T * scoring.scaling
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        scores = scores.masked_fill(~visible, -math.inf)
        if scoring.sinks is not None:
            scores = torch.cat((scores, scoring.sinks[head].double().expand(query_len, 1)), dim=1)
        weights = scores.softmax(1)[:, :context_len]
        found[:, head], weighed[:, head] = weights @ values, weights @ values.abs()
    return found, weighed


def worst_share(case: AttentionCase, contents: list[Tensors], scoring: Scoring, actual: torch.Tensor) -> float:
    """Returns the largest error divided by its bound; infinite for NaN. `actual` [num_tokens, num_heads, head_dim]."""
    worst, row = 0.0, 0
    for content in contents:
        expected, weighed = reference(case, content, scoring)
        error = (actual[row : row + len(expected)].double() - expected).abs()
        bound = (torch.finfo(case.torch_dtype).eps + FLOAT32_SLACK) * weighed
        share = float((error / bound).max())
        worst, row = max(worst, math.inf if math.isnan(share) else share), row + len(expected)
    return worst
