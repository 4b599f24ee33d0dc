"""Compares the attention kernels with attention_parity.py: compiled on a GPU, otherwise interpreted."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch

from pd_cluster.model.kernels.cuda.attention import paged_attention
from pd_cluster.model.kernels.cuda.attention.attention_configs import configs_for
from pd_cluster.model.kernels.cuda.attention.attention_plan import SPLIT_KEYS, PlanRules, plan_attention
from pd_cluster.model.layers.attention.sdpa import Scoring
from tests.support.attention_parity import EDGE, AttentionCase, Tensors, content_of, worst_share
from tests.support.interpreted import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FAR_STRIDE = (1 << 31) // 3 // 16 * 16  # elements between blocks, so that the fourth block starts beyond 2**31

assert EDGE == SPLIT_KEYS

if INTERPRETED:
    mend()


def worst_error(**given: Any) -> float:
    """Returns the largest error divided by its bound; infinite for NaN."""
    given["sequences"] = [tuple(each) for each in given["sequences"]]
    case = AttentionCase(**given, device="cpu" if INTERPRETED else "cuda")
    generator = torch.Generator(case.device).manual_seed(11)
    key_pool, value_pool = pools(case)
    contents = contents_of(case, len(key_pool), generator)
    sinks = None
    if case.has_sinks:
        sinks = torch.randn(case.num_heads, generator=generator, device=case.device).to(case.torch_dtype)
    scoring = Scoring(case.head_dim**-0.5, case.window, case.softcap, sinks)
    actual = by_kernels(case, contents, key_pool, value_pool, scoring)
    return worst_share(case, contents, scoring, actual)


def contents_of(case: AttentionCase, num_blocks: int, generator: torch.Generator) -> list[Tensors]:
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(12))
    order = torch.cat((torch.tensor([len(order)]), order))  # uses the last block
    contents = []
    for query_len, context_len in case.sequences:
        num_blocks = -(-context_len // case.block_size)
        table, order = order[:num_blocks].to(case.device), order[num_blocks:]
        contents.append(content_of(case, query_len, context_len, table, generator))
    return contents


def repeated(sequences: list[list[int]], num_launches: int) -> int:
    """Repeats a launch with the same numbers of splits; returns how many results have other bits than the first."""
    pairs = [(query_len, context_len) for query_len, context_len in sequences]
    device = "cpu" if INTERPRETED else "cuda"
    case = AttentionCase(sequences=pairs, num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16", device=device)
    key_pool, value_pool = pools(case)
    contents = contents_of(case, len(key_pool), torch.Generator(device).manual_seed(11))
    scoring = Scoring(case.head_dim**-0.5)
    expected = by_kernels(case, contents, key_pool, value_pool, scoring)
    batch, cached = planned(case, contents), paged_attention.PagedKV(key_pool, value_pool)
    query = torch.cat([content.query for content in contents])
    found = (paged_attention.attend(query, cached, batch, scoring) for _ in range(num_launches))
    return sum(not torch.equal(each, expected) for each in found)


def pools(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two views of one memory, as in a pool of two layers: [num_blocks, block_size, num_kv_heads, head_dim]."""
    num_blocks = 2 + sum(-(-context_len // case.block_size) for _, context_len in case.sequences)
    plane = case.block_size * case.num_kv_heads * case.head_dim
    stride = FAR_STRIDE if case.is_far else 4 * plane
    memory = torch.empty((num_blocks - 1) * stride + 4 * plane, dtype=case.torch_dtype, device=case.device)
    if not case.is_far:  # in a far pool, only blocks in use are written
        memory.fill_(math.nan)
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    strides = (stride, case.num_kv_heads * case.head_dim, case.head_dim, 1)
    return memory.as_strided(shape, strides, 2 * plane), memory.as_strided(shape, strides, 3 * plane)


def by_kernels(
    case: AttentionCase,
    contents: list[Tensors],
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Returns [num_tokens, num_heads, head_dim]. The kernel also writes the new tokens' keys and values."""
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
    paged_attention.write_kv(keys, values, key_pool, value_pool, torch.cat(slots))
    batch, cached = planned(case, contents), paged_attention.PagedKV(key_pool, value_pool)
    query = torch.cat([content.query for content in contents])
    numel = batch.plan.workspace_numel(case.num_heads, case.head_dim)
    workspace = torch.full((numel,), math.nan, device=case.device)
    return paged_attention.attend(query, cached, batch, scoring, paged_attention.Buffers(workspace=workspace))


def planned(case: AttentionCase, contents: list[Tensors]) -> paged_attention.BatchMetadata:
    """Plans with the configs that a server uses on this device; the interpreter uses those of Hopper."""
    query_lens, context_lens = np.array(case.sequences).T
    group, bits = case.num_heads // case.num_kv_heads, case.torch_dtype.itemsize * 8
    capability, num_sms = (9, 0), 4
    if not INTERPRETED:
        capability = torch.cuda.get_device_capability()
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = configs_for(case.head_dim, bits, group, capability)
    plan = plan_attention(query_lens, context_lens, PlanRules(group, case.num_kv_heads, configs, num_sms))

    def there(numbers: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers), dtype=torch.int32, device=case.device)

    return paged_attention.BatchMetadata(
        plan,
        there([0, *np.cumsum(query_lens)]),
        there(context_lens),
        torch.cat([content.table for content in contents]).int(),
        there([0, *np.cumsum([len(content.table) for content in contents])]),
        there(plan.decode_seqs),
        there(plan.tiles),
        torch.zeros(plan.num_arrivals(case.num_kv_heads), dtype=torch.int32, device=case.device),
    )
