"""The Triton kernel for decode: one query per sequence, with its keys split by position.

A row's splits depend only on its own context, so its bits do not depend on other rows. The programs share the list of
all rows' splits, which they derive from context_lens, and each takes every n-th split. So a single long context
occupies the whole device, and no program starts without work. The program that completes a row's last split merges all
of the row's splits, always in the order of their positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.attention.attention_kernels import add_sink, rope_of, sweep
from pd_cluster.model.kernels.cuda.dependent_launch import begin


@triton.jit
def _splits_of(context_len, window, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Returns (first split, end, keys per split), scalars or vectors; at least one split and at most MAX_SPLITS.

    Split i starts at key i * keys. A context too long for MAX_SPLITS has wider splits, in multiples of SPLIT_KEYS.
    """
    seen_from = context_len * 0
    if HAS_WINDOW:
        seen_from = tl.maximum(context_len - window, 0)
    widening = tl.cdiv(context_len - seen_from, SPLIT_KEYS * (MAX_SPLITS - 1))
    keys = SPLIT_KEYS * tl.maximum(widening, 1)
    first = seen_from // keys
    return first, tl.maximum(tl.cdiv(context_len, keys), first + 1), keys


@triton.jit
def _counts_at(
    base,
    context_lens,
    decode_seqs,
    num_decode,
    window,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SEARCHED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ALL_DECODE: tl.constexpr,
):
    """Returns the numbers of splits of SEARCHED rows from row `base` on; 0 after the last row."""
    at = base + tl.arange(0, SEARCHED)
    seqs = at
    if not ALL_DECODE:
        seqs = tl.load(decode_seqs + at, mask=at < num_decode, other=0)
    lens = tl.load(context_lens + seqs, mask=at < num_decode, other=0)
    first, end, _ = _splits_of(lens, window, SPLIT_KEYS, MAX_SPLITS, HAS_WINDOW)
    return tl.where(at < num_decode, end - first, 0)


@triton.jit
def _merged(
    partial,
    partial_lse,
    row,  # int64: the first split of the row's first head
    kv_head,
    num_splits,
    max_splits,
    sinks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Returns [MERGED, D] float32: the merged splits of a KV head's query heads; reads CHUNK splits at a time.

    Rows after GROUP repeat the last row. Other programs wrote the partial results, so reads bypass the L1 cache.
    """
    d = tl.arange(0, D)
    heads = kv_head * GROUP + tl.minimum(tl.arange(0, MERGED), GROUP - 1)
    slots = row + heads * max_splits
    acc = tl.zeros([MERGED, D], tl.float32)
    top = tl.full([MERGED], float("-inf"), tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total += 1.0
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        at = slots[:, None] + split[None, :]
        is_split = (split < num_splits)[None, :]
        lse = tl.load(partial_lse + at, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        there = is_split[:, :, None] & (d < HEAD_DIM)[None, None, :]
        part_at = (at * HEAD_DIM)[:, :, None] + d[None, None, :]
        part = tl.load(partial + part_at, mask=there, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 1))  # finite, because every written split has seen a key
        weights = tl.exp2(lse - new_top[:, None])
        fade = tl.exp2(top - new_top)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * part, 1)
        total = total * fade + tl.sum(weights, 1)
        top = new_top
    return acc / total[:, None]


@triton.jit(
    do_not_specialize=["num_decode", "max_splits"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "block_table", "table_starts", "decode_seqs"],
)
def decode_kernel(
    query,
    out,
    partial,  # [num_decode, num_heads, max_splits, HEAD_DIM] float32
    partial_lse,  # [num_decode, num_heads, max_splits] float32: log2 of the sum of weights
    arrivals,  # [num_decode, num_kv_heads] int32: all 0 between launches
    key_pool,
    value_pool,
    query_starts,
    context_lens,
    block_table,  # slots with HAS_SLOTS
    table_starts,
    decode_seqs,  # [num_decode]
    sinks,
    num_decode,
    max_splits,
    query_stride,
    query_head_stride,
    out_stride,
    block_stride,
    token_stride,
    head_stride,
    value_block_stride,
    value_token_stride,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SEARCHED: tl.constexpr,
    MERGED: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ALL_DECODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_kv_heads, workers). The tile's rows are the query heads of one KV head.

    Worker w takes the splits w, w + workers, ... of all rows. If a row has one split, its result is final. Otherwise
    the partial result is stored and counted. The program that counts the last split merges all, and resets the count to
    0. ALL_DECODE: all sequences decode, and the query of sequence i is row i.
    """
    begin(PDL)
    kv_head = tl.program_id(0)
    num_items = 0
    for base in range(0, num_decode, SEARCHED):
        num_items += tl.sum(
            _counts_at(
                base, context_lens, decode_seqs, num_decode, window,
                SPLIT_KEYS, MAX_SPLITS, SEARCHED, HAS_WINDOW, ALL_DECODE,
            )
        )  # fmt: skip
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    heads = kv_head * GROUP + r
    there = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head_at = kv_head * head_stride
    if CODES > 0:
        head_at = tl.multiple_of(head_at, 4)

    for item in range(tl.program_id(1), num_items, tl.num_programs(1)):
        place = tl.program_id(1) * 0  # index of the row that contains the current split
        before = 0  # splits of all rows before that row
        passed = 0
        for base in range(0, num_decode, SEARCHED):
            counts = _counts_at(
                base, context_lens, decode_seqs, num_decode, window,
                SPLIT_KEYS, MAX_SPLITS, SEARCHED, HAS_WINDOW, ALL_DECODE,
            )  # fmt: skip
            ends = passed + tl.cumsum(counts, 0)
            is_before = (counts > 0) & (ends <= item)
            place += tl.sum(is_before.to(tl.int32))
            before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0)))
            passed += tl.sum(counts)
        seq = place
        row = place
        if not ALL_DECODE:
            seq = tl.load(decode_seqs + place)
            row = tl.load(query_starts + seq)
        context_len = tl.load(context_lens + seq)
        table = block_table + tl.load(table_starts + seq)
        first, end, keys = _splits_of(context_len, window, SPLIT_KEYS, MAX_SPLITS, HAS_WINDOW)
        split = item - before
        q_rows = row.to(tl.int64) * query_stride + heads * query_head_stride
        q = tl.load(query + q_rows[:, None] + d[None, :], mask=there, other=0.0)
        q_rope = q
        if ROPE_DIM > 0:
            q_rope = rope_of(query, q_rows, r < GROUP, HEAD_DIM, ROPE_DIM, R)

        lo = (first + split) * keys
        hi = tl.minimum(lo + keys, context_len)
        whole_lo = lo
        whole_hi = hi // BLOCK_N * BLOCK_N
        seen_from = 0
        if HAS_WINDOW:
            seen_from = tl.maximum(context_len - window, 0)
            lo = tl.maximum(lo, seen_from // BLOCK_N * BLOCK_N)
            edge = tl.cdiv(seen_from, BLOCK_N) * BLOCK_N
            whole_lo = tl.maximum(lo, tl.minimum(edge, tl.cdiv(hi, BLOCK_N) * BLOCK_N))
            whole_hi = tl.maximum(whole_lo, whole_hi)
        positions = tl.full([BLOCK_M], 0, tl.int32) + (context_len - 1)
        acc, top, total = sweep(
            q, q_rope, positions, positions, seen_from, lo, whole_lo, whole_hi, hi,
            key_pool + head_at, value_pool + head_at, table, block_stride, token_stride,
            value_block_stride, value_token_stride, window, scale, softcap,
            HEAD_DIM, BLOCK_M, D, ROPE_DIM, R, BLOCK_N, BLOCK_SIZE,
            HAS_WINDOW, HAS_SOFTCAP, PRECISION, CODES, HAS_SLOTS,
        )  # fmt: skip
        num_splits = end - first
        if num_splits > 1:
            own_row = place.to(tl.int64) * tl.num_programs(0) * GROUP * max_splits
            slot = own_row + heads * max_splits + split
            tl.store(partial + (slot * HEAD_DIM)[:, None] + d[None, :], acc / total[:, None], mask=there)
            tl.store(partial_lse + slot, top + tl.log2(total), mask=r < GROUP)
            arrived = arrivals + place * tl.num_programs(0) + kv_head
            # Only one thread counts. The barrier orders the other threads' stores before the count's release, and the
            # atomic's own barrier orders their loads after its acquire.
            tl.debug_barrier()
            if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                merged = _merged(
                    partial, partial_lse, own_row, kv_head, num_splits, max_splits, sinks,
                    GROUP, HEAD_DIM, D, MERGED, CHUNK, HAS_SINKS,
                )  # fmt: skip
                g = tl.arange(0, MERGED)
                out_at = row.to(tl.int64) * out_stride + ((kv_head * GROUP + g) * HEAD_DIM)[:, None] + d[None, :]
                is_there = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
                tl.store(out + out_at, merged.to(out.dtype.element_ty), mask=is_there)
                tl.store(arrived, 0)  # the next launch begins after this one
        else:
            if HAS_SINKS:
                fade, total = add_sink(top, total, sinks, heads, r < GROUP)
                acc *= fade[:, None]
            acc /= tl.where(total > 0, total, 1.0)[:, None]  # padding has no visible key
            out_at = row.to(tl.int64) * out_stride + (heads * HEAD_DIM)[:, None] + d[None, :]
            tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=there)
