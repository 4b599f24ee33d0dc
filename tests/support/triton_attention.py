"""Compares paged attention in Triton's interpreter with sdpa.write_and_attend. Runs in a TritonChild."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.cuda.attention import paged_attention
from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs, TileConfig, padded
from pd_cluster.model.kernels.cuda.attention.attention_plan import (
    SPLIT_KEYS,
    AttentionPlan,
    PlanRules,
    plan_attention,
    plan_decode,
)
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.interpreted import mend

ANY = Sampling(max_tokens=1, temperature=0.0)
LAYER, NUM_LAYERS = 1, 2


mend()


def configs(group: int, rows: int = 16, keys: int = 32) -> AttentionConfigs:
    """Returns configs with tiles so small that short sequences have several."""
    return AttentionConfigs(TileConfig(max(rows, padded(group)), keys, 4, 2), TileConfig(padded(group), keys, 4, 2))


def make_batch(
    sequences: list[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int,
    window: int | None = None,
) -> ForwardBatch:
    """Makes sequences (query_len, context_len) in random blocks of a pool; slots without a token hold NaN.

    Blocks that the window has passed are released: the table has the padding block there, which also holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in sequences]
    layout = KVLayout(NUM_LAYERS, num_kv_heads, keys_and_values(head_dim), block_size, "float32")
    pool = KVPool(layout, sum(counts) + 3)
    pool.data.fill_(float("nan"))
    blocks = torch.randperm(pool.num_blocks, generator=generator).tolist()
    chunks = []
    for i, ((query_len, context), count) in enumerate(zip(sequences, counts, strict=True)):
        table, blocks = blocks[:count], blocks[count:]
        prefix = context - query_len
        at = torch.arange(prefix)
        content = torch.randn(prefix, NUM_LAYERS, 2, num_kv_heads, head_dim, generator=generator)
        pool.data[torch.tensor(table)[at // block_size], :, :, at % block_size] = content
        num_passed = max(0, prefix - window + 1) // block_size if window is not None else 0
        table[:num_passed] = [pool.num_blocks] * num_passed
        request = Request(
            str(i), RequestSpec([0] * context, ANY), num_computed_tokens=prefix, tables=[table], arrival_s=float(i)
        )
        chunks.append((request, query_len))
    return build_batch(chunks, pool)


def metadata(batch: ForwardBatch, plan: AttentionPlan) -> paged_attention.BatchMetadata:
    return paged_attention.BatchMetadata(
        plan,
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_starts,
        torch.from_numpy(plan.decode_seqs),
        torch.from_numpy(plan.tiles),
        torch.zeros(plan.num_arrivals(batch.pool.layout.num_kv_heads), dtype=torch.int32),
        batch.key_limits,
    )


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference over the largest magnitude; infinite if any value is NaN."""
    error = (actual.double() - expected.double()).abs().max() / expected.abs().max().double()
    return float("inf") if error.isnan() else error.item()


def parity(
    sequences: list[tuple[int, int]],  # (query_len, context_len)
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    split_keys: int = SPLIT_KEYS,
    rows: int = 16,
    keys: int = 32,
    seed: int = 0,
    limits: list[int] | None = None,  # end of the visible keys of each row
    is_uniform: bool = False,
) -> float:
    """Writes and attends both ways; returns their `difference`. Asserts that the pools are equal."""
    torch.manual_seed(seed)
    batch, other = (make_batch(sequences, num_kv_heads, head_dim, block_size, seed, window) for _ in range(2))
    if limits is not None:
        batch.key_limits = other.key_limits = torch.tensor(limits, dtype=torch.int32)
    qkv = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    sinks = torch.randn(num_heads) * 2 if has_sinks else None
    scoring = sdpa.Scoring(head_dim**-0.5 * 1.5, window, softcap, sinks)

    key_pool, value_pool = batch.pool.layer(LAYER)
    paged_attention.write_kv(k, v, key_pool, value_pool, batch.slot_mapping)
    query_lens = np.diff(batch.query_starts.numpy())
    group = num_heads // num_kv_heads
    chosen = replace(configs(group, rows, keys), is_uniform=is_uniform)
    plan = plan_attention(
        query_lens, batch.context_lens.numpy(), PlanRules(group, num_kv_heads, chosen, 132, split_keys)
    )
    workspace = torch.full((plan.workspace_numel(num_heads, head_dim),), float("nan"))
    actual = paged_attention.attend(
        query,
        paged_attention.PagedKV(key_pool, value_pool),
        metadata(batch, plan),
        scoring,
        paged_attention.Buffers(workspace=workspace),
    )
    expected = sdpa.write_and_attend(LAYER, query.transpose(0, 1), k, v, other, scoring)
    torch.testing.assert_close(batch.pool.data, other.pool.data, rtol=0, atol=0, equal_nan=True)
    return difference(actual, expected)


def among_others(lens: list[int], window: int | None, num_sms: int, split_keys: int) -> tuple[float, bool]:
    """Decodes rows with contexts of these lengths; returns their `difference` from the reference, and whether the
    longest has the same bits alone.
    """
    num_heads, head_dim = 2, 16
    torch.manual_seed(5)
    batch = make_batch([(1, length) for length in lens], 1, head_dim, 32, 5, window)
    scoring = sdpa.Scoring(0.3, window)
    query = torch.randn(len(lens), num_heads, head_dim)
    k, v = torch.randn(2, len(lens), 1, head_dim)
    expected = sdpa.write_and_attend(LAYER, query.transpose(0, 1), k, v, batch, scoring)

    def attended(part: ForwardBatch, rows: slice) -> torch.Tensor:
        plan = plan_decode(part.num_seqs, max(lens), 1, configs(num_heads), num_sms, split_keys)
        pools = paged_attention.PagedKV(*batch.pool.layer(LAYER))
        return paged_attention.attend(query[rows], pools, metadata(part, plan), scoring)

    together, at = attended(batch, slice(None)), lens.index(max(lens))
    table = batch.block_table[batch.table_starts[at] : batch.table_starts[at + 1]].tolist()
    request = Request("alone", RequestSpec([0] * lens[at], ANY), num_computed_tokens=lens[at] - 1, tables=[table])
    alone = attended(build_batch([(request, 1)], batch.pool), slice(at, at + 1))
    return difference(together, expected), torch.equal(alone[0], together[at])


def replays(
    steps: list[list[int]], split_keys: int, block_size: int = 16, window: int | None = None, has_sinks: bool = False
) -> list[dict[str, float]]:
    """Runs steps of a padded decode batch as in a captured graph: one plan and the same buffers, with other contents.

    A context of 0 is padding. Returns for each step the rows' difference from the reference, and the largest value in
    padding. Unused table entries name a block far outside the pool, which must not be read.
    """
    num_seqs, num_heads, num_kv_heads, head_dim = len(steps[0]), 4, 2, 16
    torch.manual_seed(1)
    sinks = torch.randn(num_heads) if has_sinks else None
    scoring = sdpa.Scoring(0.3, window, None, sinks)
    plan = plan_decode(num_seqs, 10_000, num_kv_heads, configs(2), 132, split_keys)
    table = torch.empty(num_seqs * 30, dtype=torch.int32)
    starts, contexts = torch.zeros(num_seqs + 1, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
    unread = torch.full((1,), 1 << 30, dtype=torch.int32)
    arrivals = torch.zeros(plan.num_arrivals(num_kv_heads), dtype=torch.int32)
    static = paged_attention.BatchMetadata(plan, unread, contexts, table, starts, unread, unread, arrivals)
    query, out = torch.empty(num_seqs, num_heads, head_dim), torch.empty(num_seqs, num_heads, head_dim)
    workspace = torch.empty(plan.workspace_numel(num_heads, head_dim))
    told = []
    for seed, step in enumerate(steps):
        real = [context for context in step if context]
        batch = make_batch([(1, context) for context in real], num_kv_heads, head_dim, block_size, seed, window)
        table.fill_(1 << 30)[: len(batch.block_table)] = batch.block_table
        starts.fill_(len(batch.block_table))[: len(batch.table_starts)] = batch.table_starts
        contexts.zero_()[: len(real)] = batch.context_lens
        for buffer in (out, workspace):
            buffer.fill_(float("nan"))
        query.normal_()
        k, v = torch.randn(2, len(real), num_kv_heads, head_dim)
        expected = sdpa.write_and_attend(LAYER, query[: len(real)].transpose(0, 1), k, v, batch, scoring)
        pools, buffers = paged_attention.PagedKV(*batch.pool.layer(LAYER)), paged_attention.Buffers(out, workspace)
        paged_attention.attend(query, pools, static, scoring, buffers)
        padding = out[len(real) :].abs().max().item() if len(real) < num_seqs else 0.0
        told.append({"difference": difference(out[: len(real)], expected), "padding": padding})
    return told
