"""Triton kernels for paged attention: a sweep over keys, and the prefill kernel that uses it.

Scores are in units of log2, so that a weight takes one exp2. A program processes its keys tile by tile, and masks a
tile only at the context's end, on the diagonal or at a window's edge. attention_plan.py plans the grid;
attention_decode.py has the kernel for decode.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.attention.quantized_kv import decoded, scale_at
from pd_cluster.model.kernels.cuda.dependent_launch import begin


@triton.jit
def _blocks_at(table, start, hi, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SLOTS: tl.constexpr):
    """Returns one block for the tile's keys, or one for each key; 0 for keys from `hi` on.

    HAS_SLOTS: the table has a slot for each key, which is returned instead.
    """
    if HAS_SLOTS:
        n = tl.arange(0, BLOCK_N)
        block = tl.load(table + start + n, mask=start + n < hi, other=0)
    elif BLOCK_N <= BLOCK_SIZE:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < hi, other=0)
    else:
        n = tl.arange(0, BLOCK_N)
        block = tl.load(table + start // BLOCK_SIZE + n // BLOCK_SIZE, mask=start + n < hi, other=0)
    return block


@triton.jit
def _vectors_at(
    block,  # from `_blocks_at`
    start,
    block_stride,
    token_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """Returns the offsets [BLOCK_N] of a tile of keys in a plane."""
    n = tl.arange(0, BLOCK_N)
    if HAS_SLOTS:
        at = (block // BLOCK_SIZE).to(tl.int64) * block_stride + (block % BLOCK_SIZE) * token_stride
    elif BLOCK_N <= BLOCK_SIZE:
        at = block.to(tl.int64) * block_stride + (start % BLOCK_SIZE + n) * token_stride
    else:
        at = block.to(tl.int64) * block_stride + (n % BLOCK_SIZE) * token_stride
    return at


@triton.jit
def _rope_scores(
    q_rope,  # [M, R]
    base,
    block,
    start,
    is_seen,  # [BLOCK_N]
    block_stride,
    token_stride,
    ROPE_DIM: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """Returns the products [M, BLOCK_N] of queries with the rotated parts of a tile of keys."""
    d = tl.arange(0, R)
    rows = _vectors_at(block, start, block_stride, token_stride, BLOCK_N, BLOCK_SIZE, HAS_SLOTS)
    there = is_seen[:, None] & (d < ROPE_DIM)[None, :]
    if CODES > 0:
        rows = tl.multiple_of(rows, 4)
        k = decoded(base, rows, there, d, q_rope.dtype, ROPE_DIM, CODES)
    else:
        k = tl.load(base + rows[:, None] + d[None, :], mask=there, other=0.0).to(q_rope.dtype)
    scores = tl.dot(q_rope, tl.trans(k), input_precision=PRECISION)
    if CODES > 0:
        scores *= scale_at(base, rows, is_seen, ROPE_DIM, CODES)[None, :]
    return scores


@triton.jit
def rope_of(query, rows, there, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, R: tl.constexpr):
    """Returns the rotated parts [M, R] of queries at `rows`; in a query they follow the first HEAD_DIM numbers."""
    d = tl.arange(0, R)
    at = rows[:, None] + (HEAD_DIM + d)[None, :]
    return tl.load(query + at, mask=there[:, None] & (d < ROPE_DIM)[None, :], other=0.0)


@triton.jit
def _attend_tile(
    acc,  # [M, D] float32
    top,  # [M] float32: highest score so far
    total,  # [M] float32: sum of weights so far
    q,  # [M, D]
    q_rope,  # [M, R], with ROPE_DIM
    positions,  # [M] int32: the queries' positions
    ends,  # [M] int32: the last visible key of each query
    block,  # from `_blocks_at`
    start,  # first key, a multiple of BLOCK_N
    seen_from,  # the first key that is visible to any query
    hi,  # the end of the keys
    key_base,
    value_base,
    block_stride,
    token_stride,
    value_block_stride,
    value_token_stride,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,  # quantized_kv.CODES; 0: the pool is not quantized
    HAS_SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Returns (acc, top, total) after processing BLOCK_N more keys.

    With ROPE_DIM the first plane has latents, which are also the values, and the second has the keys' rotated parts.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    rows = _vectors_at(block, start, block_stride, token_stride, BLOCK_N, BLOCK_SIZE, HAS_SLOTS)
    if CODES > 0:
        rows = tl.multiple_of(rows, 4)  # the scales are aligned, so codes are loaded four at a time
    offsets = rows[:, None] + d[None, :]
    if MASKED:  # masked values may be NaN, which a weight of zero would not remove
        is_seen = start + n < hi
        if HAS_WINDOW:
            is_seen = is_seen & (start + n >= seen_from)
    else:
        is_seen = n >= 0
    if CODES > 0:
        there = is_seen[:, None] & (d < HEAD_DIM)[None, :]
        k = decoded(key_base, rows, there, d, q.dtype, HEAD_DIM, CODES)
        if ROPE_DIM == 0:
            v = decoded(value_base, rows, there, d, q.dtype, HEAD_DIM, CODES)
    elif MASKED:
        there = is_seen[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(key_base + offsets, mask=there, other=0.0).to(q.dtype)
        if ROPE_DIM == 0:
            v = tl.load(value_base + offsets, mask=there, other=0.0).to(q.dtype)
    elif HEAD_DIM < D:
        k = tl.load(key_base + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
        if ROPE_DIM == 0:
            v = tl.load(value_base + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
    else:
        k = tl.load(key_base + offsets).to(q.dtype)
        if ROPE_DIM == 0:
            v = tl.load(value_base + offsets).to(q.dtype)
    if ROPE_DIM > 0:
        v = k

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, BLOCK_N]
    if CODES > 0:
        scores *= scale_at(key_base, rows, is_seen, HEAD_DIM, CODES)[None, :]
    if ROPE_DIM > 0:
        scores += _rope_scores(
            q_rope, value_base, block, start, is_seen, value_block_stride, value_token_stride,
            ROPE_DIM, R, BLOCK_N, BLOCK_SIZE, PRECISION, CODES, HAS_SLOTS,
        )  # fmt: skip
    if HAS_SOFTCAP:  # tanh(x) is 1 - 2 / (exp(2 x) + 1); scale and softcap include the conversion to and from log2
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * scale) + 1.0)
    if MASKED:
        at = (start + n)[None, :]
        visible = at <= ends[:, None]
        if HAS_WINDOW:
            visible = visible & (at > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    if HAS_SOFTCAP:
        factor = 1.0
    else:
        factor = scale  # multiplied below, where it fuses with the subtraction into one multiply-add
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    if MASKED:  # weights stay zero while a row has not seen any key
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        shift = new_top
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    if CODES > 0:
        values = key_base if ROPE_DIM > 0 else value_base
        weights *= scale_at(values, rows, is_seen, HEAD_DIM, CODES)[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def sweep(
    q,
    q_rope,
    positions,
    ends,  # [M]: the last visible key of each query, at least its own position
    seen_from,  # the first key that is visible to any query
    lo,  # all keys are in [lo, hi); lo is a multiple of BLOCK_N
    whole_lo,  # all queries see the keys [whole_lo, whole_hi), both multiples of BLOCK_N
    whole_hi,
    hi,
    key_base,
    value_base,
    table,
    block_stride,
    token_stride,
    value_block_stride,
    value_token_stride,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """Processes the keys in three loops: the window's lower edge, the unmasked middle, the upper edge.

    Blocks are looked up one tile ahead. Otherwise loads of keys would wait for lookups, with fewer tiles in flight.
    """
    acc = tl.zeros([M, D], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    upcoming = _blocks_at(table, lo, hi, BLOCK_N, BLOCK_SIZE, HAS_SLOTS)
    if HAS_WINDOW:
        for start in range(lo, whole_lo, BLOCK_N):
            block = upcoming
            upcoming = _blocks_at(table, start + BLOCK_N, hi, BLOCK_N, BLOCK_SIZE, HAS_SLOTS)
            acc, top, total = _attend_tile(
                acc, top, total, q, q_rope, positions, ends, block, start, seen_from, hi, key_base, value_base,
                block_stride, token_stride, value_block_stride, value_token_stride, window, scale, softcap,
                HEAD_DIM, D, ROPE_DIM, R, BLOCK_N, BLOCK_SIZE,
                HAS_WINDOW, HAS_SOFTCAP, PRECISION, CODES, HAS_SLOTS, MASKED=True,
            )  # fmt: skip
    for start in range(whole_lo, whole_hi, BLOCK_N):
        block = upcoming
        upcoming = _blocks_at(table, start + BLOCK_N, hi, BLOCK_N, BLOCK_SIZE, HAS_SLOTS)
        acc, top, total = _attend_tile(
            acc, top, total, q, q_rope, positions, ends, block, start, seen_from, hi, key_base, value_base,
            block_stride, token_stride, value_block_stride, value_token_stride, window, scale, softcap,
            HEAD_DIM, D, ROPE_DIM, R, BLOCK_N, BLOCK_SIZE,
            HAS_WINDOW, HAS_SOFTCAP, PRECISION, CODES, HAS_SLOTS, MASKED=False,
        )  # fmt: skip
    for start in range(whole_hi, hi, BLOCK_N):
        block = upcoming
        upcoming = _blocks_at(table, start + BLOCK_N, hi, BLOCK_N, BLOCK_SIZE, HAS_SLOTS)
        acc, top, total = _attend_tile(
            acc, top, total, q, q_rope, positions, ends, block, start, seen_from, hi, key_base, value_base,
            block_stride, token_stride, value_block_stride, value_token_stride, window, scale, softcap,
            HEAD_DIM, D, ROPE_DIM, R, BLOCK_N, BLOCK_SIZE,
            HAS_WINDOW, HAS_SOFTCAP, PRECISION, CODES, HAS_SLOTS, MASKED=True,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def add_sink(top, total, sinks, heads, is_head):
    """Adds a key with its own score and the value zero. Returns (factor for the previous sums, total)."""
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return fade, total * fade + tl.exp2(sink - new_top)


@triton.jit(
    do_not_specialize_on_alignment=[
        "query_starts",
        "context_lens",
        "block_table",
        "table_starts",
        "tiles",
        "key_limits",
    ]
)
def prefill_kernel(
    query,
    out,
    key_pool,
    value_pool,
    query_starts,
    context_lens,
    block_table,  # slots with HAS_SLOTS
    table_starts,
    tiles,  # [num_tiles, 2]: sequence, first query
    key_limits,  # [num_tokens]: the end of each query's visible keys; read with HAS_LIMITS
    sinks,
    num_kv_heads,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    UNIFORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: num_tiles * num_kv_heads. Row r of a tile is query r // GROUP, and query head r % GROUP of the KV head.

    UNIFORM: all tiles of keys are masked, so a query's result does not depend on the other queries in its tile. Tiles
    start at multiples of BLOCK_N in every chunk, and a tile without visible keys does not change the query's sums.
    """
    begin(PDL)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    seq = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    row_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - row_start
    prefix = tl.load(context_lens + seq) - query_len
    table = block_table + tl.load(table_starts + seq)

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    index = first + r // GROUP
    heads = kv_head * GROUP + r % GROUP
    is_row = (r < QUERIES * GROUP) & (index < query_len)
    there = is_row[:, None] & (d < HEAD_DIM)[None, :]
    token = (row_start + index).to(tl.int64)
    q_rows = token * query_stride + heads * query_head_stride
    q = tl.load(query + q_rows[:, None] + d[None, :], mask=there, other=0.0)
    q_rope = q
    if ROPE_DIM > 0:
        q_rope = rope_of(query, q_rows, is_row, HEAD_DIM, ROPE_DIM, R)

    least = prefix + first
    most = prefix + tl.minimum(first + QUERIES, query_len) - 1
    hi = most + 1
    ends = prefix + index
    if HAS_LIMITS:
        ends = tl.load(key_limits + row_start + index, mask=is_row, other=1) - 1
        hi = tl.max(ends, 0) + 1
    whole_hi = (least + 1) // BLOCK_N * BLOCK_N
    seen_from = 0
    lo = 0
    whole_lo = 0
    if HAS_WINDOW:
        seen_from = tl.maximum(least - window + 1, 0)
        lo = seen_from // BLOCK_N * BLOCK_N
        whole_lo = tl.cdiv(tl.maximum(most - window + 1, 0), BLOCK_N) * BLOCK_N
        whole_hi = tl.maximum(whole_lo, whole_hi)
    if UNIFORM:
        whole_lo = lo
        whole_hi = lo
    head_at = kv_head * head_stride
    if CODES > 0:
        head_at = tl.multiple_of(head_at, 4)
    acc, top, total = sweep(
        q, q_rope, prefix + index, ends, seen_from, lo, whole_lo, whole_hi, hi,
        key_pool + head_at, value_pool + head_at, table, block_stride, token_stride,
        value_block_stride, value_token_stride, window, scale, softcap,
        HEAD_DIM, BLOCK_M, D, ROPE_DIM, R, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, PRECISION, CODES,
        HAS_SLOTS,
    )  # fmt: skip
    if HAS_SINKS:
        fade, total = add_sink(top, total, sinks, heads, is_row)
        acc *= fade[:, None]
    acc /= tl.where(total > 0, total, 1.0)[:, None]  # padding has no visible key
    out_at = (token * out_stride + heads * HEAD_DIM)[:, None] + d[None, :]
    tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=there)
