"""The attention kernels against a reference in float64: on a GPU as they are compiled, otherwise interpreted.

Each sequence has needles: keys at its first, its last and some other positions, which look like its queries and share
about half of the weight. So one block that is dropped, taken twice or looked up wrongly moves the result by several
percent, while sums over random keys alone would hide it below the precision of 16 bits. The error is measured against a
bound that follows from the precision: weights and the result are rounded once each, and sums are kept in float32.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pd_cluster.kv.pool import TORCH_DTYPES
from pd_cluster.model.attention.sdpa import Scoring
from pd_cluster.model.cuda import attention
from pd_cluster.model.cuda.attention_configs import configs_for
from pd_cluster.model.cuda.plan import SPLIT_KEYS, AttentionPlan, plan_attention
from tests.support.interpreted import mend
from tests.support.triton_mutants import faulty

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUM_NEEDLES = 8
FLOAT32_SLACK = 2.0**-12  # of exp2, the sums and the product with the softcap
FAR_STRIDE = (1 << 31) // 3 // 16 * 16  # elements from block to block: the fourth lies beyond 2**31

if INTERPRETED:
    mend()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """`sequences`: (query_len, context_len). `is_far`: blocks lie so far apart that offsets exceed 32 bits."""

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

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def device(self) -> str:
        return "cpu" if INTERPRETED else "cuda"


@dataclass(slots=True)
class Tensors:
    """The content of one sequence, in the precision of the pool."""

    query: torch.Tensor  # [query_len, num_heads, head_dim]
    keys: torch.Tensor  # [context_len, num_kv_heads, head_dim]
    values: torch.Tensor
    table: torch.Tensor  # [num_blocks] int64


def worst_error(fault: tuple[str, str] | None = None, **case: Any) -> float:
    """Returns the largest error in units of its bound; infinite for NaN. `fault`: text, its replacement."""
    case["sequences"] = [tuple(each) for each in case["sequences"]]
    given = AttentionCase(**case)
    with faulty(*fault) if fault else contextlib.nullcontext():
        return _worst_error(given)


def _worst_error(case: AttentionCase) -> float:
    generator = torch.Generator(case.device).manual_seed(11)
    key_pool, value_pool = pools(case)
    order = torch.randperm(len(key_pool) - 1, generator=torch.Generator().manual_seed(12))
    order = torch.cat((torch.tensor([len(order)]), order))  # the farthest block is in use
    contents = []
    for query_len, context_len in case.sequences:
        num_blocks = -(-context_len // case.block_size)
        table, order = order[:num_blocks].to(case.device), order[num_blocks:]
        contents.append(content_of(case, query_len, context_len, table, generator))
    sinks = None
    if case.has_sinks:
        sinks = torch.randn(case.num_heads, generator=generator, device=case.device).to(case.torch_dtype)
    scoring = Scoring(case.head_dim**-0.5, case.window, case.softcap, sinks)
    actual = by_kernels(case, contents, key_pool, value_pool, scoring)
    worst, row = 0.0, 0
    for content in contents:
        expected, weighed = reference(case, content, scoring)
        error = (actual[row : row + len(expected)].double() - expected).abs()
        bound = (torch.finfo(case.torch_dtype).eps + FLOAT32_SLACK) * weighed
        share = float((error / bound).max())
        worst, row = max(worst, math.inf if math.isnan(share) else share), row + len(expected)
    return worst


def pools(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views [num_blocks, block_size, num_kv_heads, head_dim] of one memory, like a pool of two layers."""
    num_blocks = 2 + sum(-(-context_len // case.block_size) for _, context_len in case.sequences)
    plane = case.block_size * case.num_kv_heads * case.head_dim
    stride = FAR_STRIDE if case.is_far else 4 * plane
    memory = torch.empty((num_blocks - 1) * stride + 4 * plane, dtype=case.torch_dtype, device=case.device)
    if not case.is_far:  # of the far pool only the pages in use are touched
        memory.fill_(math.nan)
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    strides = (stride, case.num_kv_heads * case.head_dim, case.head_dim, 1)
    return memory.as_strided(shape, strides, 2 * plane), memory.as_strided(shape, strides, 3 * plane)


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
    """Returns positions that matter: both ends of what queries see, the edges of a split, and some between."""
    first = max(0, context_len - window) if window else 0
    some = np.random.default_rng(context_len).integers(first, context_len, NUM_NEEDLES - 5).tolist()
    edges = [SPLIT_KEYS - 1, SPLIT_KEYS, first, max(first, context_len - query_len), context_len - 1]
    return sorted({each for each in (*edges, *some) if first <= each < context_len})


def by_kernels(
    case: AttentionCase,
    contents: list[Tensors],
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Returns [num_tokens, num_heads, head_dim]. The queries' own keys and values are written by the kernel."""
    slots, new = [], []
    for (query_len, context_len), content in zip(case.sequences, contents, strict=True):
        at = torch.arange(context_len, device=case.device)
        blocks, offsets = content.table[at // case.block_size], at % case.block_size
        prefix = context_len - query_len
        key_pool[blocks[:prefix], offsets[:prefix]] = content.keys[:prefix]
        value_pool[blocks[:prefix], offsets[:prefix]] = content.values[:prefix]
        slots.append((blocks * case.block_size + offsets)[prefix:])
        new.append(torch.stack((content.keys[prefix:], content.values[prefix:])))
    keys, values = torch.cat(new, dim=1)
    attention.write_kv(keys, values, key_pool, value_pool, torch.cat(slots))
    batch, plan = planned(case, contents)
    query = torch.cat([content.query for content in contents])
    numel = plan.workspace_numel(case.num_heads, case.head_dim)
    workspace = torch.full((numel,), math.nan, device=case.device)
    return attention.attend(query, key_pool, value_pool, batch, plan, scoring, workspace=workspace)


def planned(case: AttentionCase, contents: list[Tensors]) -> tuple[attention.BatchMetadata, AttentionPlan]:
    """Plans with the configs that this device has when it serves; the interpreter stands for Hopper."""
    query_lens, context_lens = np.array(case.sequences).T
    group, bits = case.num_heads // case.num_kv_heads, case.torch_dtype.itemsize * 8
    capability, num_sms = (9, 0), 4
    if not INTERPRETED:
        capability = torch.cuda.get_device_capability()
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = configs_for(case.head_dim, bits, group, capability)
    plan = plan_attention(query_lens, context_lens, group, case.num_kv_heads, configs, num_sms)

    def there(numbers: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers), dtype=torch.int32, device=case.device)

    batch = attention.BatchMetadata(
        there([0, *np.cumsum(query_lens)]),
        there(context_lens),
        torch.cat([content.table for content in contents]).int(),
        there([0, *np.cumsum([len(content.table) for content in contents])]),
        there(plan.decode_seqs),
        there(plan.tiles),
    )
    return batch, plan


def reference(case: AttentionCase, content: Tensors, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float64 [query_len, num_heads, head_dim]: the result, and the weighted mean of the values' magnitudes."""
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
