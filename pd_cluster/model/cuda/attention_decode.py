"""Triton kernels of decode: one query a sequence, its keys split over programs, and the merge of what these found.

Know nothing of how the number of splits was chosen; where a split begins follows from the context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.cuda.attention_kernels import add_sink, sweep


@triton.jit
def _split_of(context_len, window, num_splits, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """A sequence's keys in BLOCK_N tiles: (first tile, end, tiles a split). Splits from the end on have nothing."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context_len - window, 0) // BLOCK_N
    end = tl.cdiv(context_len, BLOCK_N)
    return first, end, tl.maximum(tl.cdiv(end - first, num_splits), 1)


@triton.jit(do_not_specialize=["num_splits"])
def decode_kernel(
    query,
    out,
    partial,  # [num_decode, num_heads, num_splits, HEAD_DIM] float32
    partial_lse,  # [num_decode, num_heads, num_splits] float32: log2 of the sum of weights
    key_pool,
    value_pool,
    query_starts,
    context_lens,
    block_table,
    table_starts,
    decode_seqs,  # [num_decode]
    sinks,
    num_splits,
    query_stride,
    query_head_stride,
    out_stride,
    block_stride,
    token_stride,
    head_stride,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALL_DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: (num_kv_heads, num_splits, num_decode). Rows of the tile are the query heads of one KV head.

    ALL_DECODE: sequence i is the i-th and its query is row i. SPLIT: partial results are left for the merge.
    """
    kv_head, split, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ALL_DECODE:  # no load stands between the program's number and its context
        seq = place
        row = place
    else:
        seq = tl.load(decode_seqs + place)
        row = tl.load(query_starts + seq)
    context_len = tl.load(context_lens + seq)
    table = block_table + tl.load(table_starts + seq)
    first, end, per_split = _split_of(context_len, window, num_splits, BLOCK_N, HAS_WINDOW)
    first += split * per_split
    end = tl.minimum(first + per_split, end)
    if SPLIT and first >= end:
        return

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    heads = kv_head * GROUP + r
    there = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (heads * query_head_stride)[:, None] + d[None, :]
    q = tl.load(query + row.to(tl.int64) * query_stride + q_at, mask=there, other=0.0)

    lo = first * BLOCK_N
    hi = tl.minimum(end * BLOCK_N, context_len)
    whole_lo = lo
    whole_hi = hi // BLOCK_N * BLOCK_N
    seen_from = 0
    if HAS_WINDOW:
        seen_from = tl.maximum(context_len - window, 0)
        edge = tl.cdiv(seen_from, BLOCK_N) * BLOCK_N
        whole_lo = tl.maximum(lo, tl.minimum(edge, end * BLOCK_N))
        whole_hi = tl.maximum(whole_lo, whole_hi)
    positions = tl.full([BLOCK_M], 0, tl.int32) + (context_len - 1)
    acc, top, total = sweep(
        q, positions, seen_from, lo, whole_lo, whole_hi, hi,
        key_pool + kv_head * head_stride, value_pool + kv_head * head_stride, table, block_stride, token_stride,
        window, scale, softcap, HEAD_DIM, BLOCK_M, D, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    if SPLIT:
        slot = (place.to(tl.int64) * tl.num_programs(0) * GROUP + heads) * num_splits + split
        tl.store(partial + (slot * HEAD_DIM)[:, None] + d[None, :], acc / total[:, None], mask=there)
        tl.store(partial_lse + slot, top + tl.log2(total), mask=r < GROUP)
    else:
        if HAS_SINKS:
            fade, total = add_sink(top, total, sinks, heads, r < GROUP)
            acc *= fade[:, None]
        acc /= tl.where(total > 0, total, 1.0)[:, None]  # padding has seen nothing
        out_at = row.to(tl.int64) * out_stride + (heads * HEAD_DIM)[:, None] + d[None, :]
        tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial,
    partial_lse,
    out,
    query_starts,
    context_lens,
    decode_seqs,
    sinks,
    num_splits,
    out_stride,
    window,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALL_DECODE: tl.constexpr,
):
    """Grid: (num_heads, num_decode). Reads only what splits of this context have written."""
    head, place = tl.program_id(0), tl.program_id(1)
    if ALL_DECODE:
        seq = place
        row = place
    else:
        seq = tl.load(decode_seqs + place)
        row = tl.load(query_starts + seq)
    first, end, per_split = _split_of(tl.load(context_lens + seq), window, num_splits, BLOCK_N, HAS_WINDOW)
    num_used = tl.cdiv(end - first, per_split)
    slot = (place.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    d = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    for start in range(0, num_used, CHUNK):
        split = start + tl.arange(0, CHUNK)
        lse = tl.load(partial_lse + slot + split, mask=split < num_used, other=float("-inf"))
        there = (split < num_used)[:, None] & (d < HEAD_DIM)[None, :]
        part = tl.load(partial + ((slot + split) * HEAD_DIM)[:, None] + d[None, :], mask=there, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))  # finite: a split that was written has seen a key
        weights = tl.exp2(lse - new_top)
        fade = tl.exp2(top - new_top)
        acc = acc * fade + tl.sum(weights[:, None] * part, 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    acc /= tl.where(total > 0, total, 1.0)
    out_at = out + row.to(tl.int64) * out_stride + head * HEAD_DIM + d
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=d < HEAD_DIM)
