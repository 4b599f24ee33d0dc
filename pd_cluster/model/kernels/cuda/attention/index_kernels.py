"""Triton kernels that choose the keys of sparse latent attention, with the index keys in the paged pool.

    prepare_index    norms a step's index keys, and rotates them and the index queries
    keep_index_keys  writes a step's index keys to the pool
    score_keys       scores the keys that each token sees
    keep_best        finds the best keys in parts of a long context, many programs at once
    list_keys        lists the slots of each token's best keys, in the order of the keys

Scores are float32; of equal scores the first wins. A token's scores and list do not depend on the other tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.dependent_launch import begin
from pd_cluster.model.kernels.cuda.elementwise_kernels import rotated, turned

NUM_VALUES = tl.constexpr(256)  # how many values eight bits can have


@triton.jit
def prepare_index(
    queries,  # [num_tokens, NUM_HEADS, WIDTH], changed in place
    keys,  # [num_tokens, WIDTH], strided
    normed,  # [num_tokens, WIDTH], out
    weight,  # [WIDTH] float32, like bias
    bias,
    cos,  # [num_tokens, ROPE_WIDTH]; both halves are the same
    sin,
    key_stride,
    table_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated features, padded
    REST: tl.constexpr,  # the other features, padded
    PDL: tl.constexpr,
):
    """Grid: (num_tokens, 1 + tiles of HEADS heads). A token's first program takes its key, each other HEADS queries."""
    begin(PDL)
    dtype: tl.constexpr = keys.dtype.element_ty
    half: tl.constexpr = ROPE_WIDTH // 2
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)[None, :]
    cos += token * table_stride
    sin += token * table_stride
    if tl.program_id(1) > 0:
        head = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < NUM_HEADS) & (at < half)
        place = queries + (token * NUM_HEADS + head) * WIDTH + at
        own_left, own_right = rotated(place, inside, weight, cos, sin, eps, ROPE_WIDTH, HALF, False)
        tl.store(place, own_left, mask=inside)
        tl.store(place + half, own_right, mask=inside)
    else:
        rest_at = ROPE_WIDTH + tl.arange(0, REST)[None, :]
        key = keys + token * key_stride
        left = tl.load(key + at, mask=at < half, other=0.0).to(tl.float32)
        right = tl.load(key + half + at, mask=at < half, other=0.0).to(tl.float32)
        rest = tl.load(key + rest_at, mask=rest_at < WIDTH, other=0.0).to(tl.float32)
        mean = (tl.sum(left, 1) + tl.sum(right, 1) + tl.sum(rest, 1))[:, None] / WIDTH
        left = tl.where(at < half, left - mean, 0.0)
        right = tl.where(at < half, right - mean, 0.0)
        rest = tl.where(rest_at < WIDTH, rest - mean, 0.0)
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / WIDTH + eps)[:, None]
        left = _affine(left * factor, weight + at, bias + at, at < half, dtype)
        right = _affine(right * factor, weight + half + at, bias + half + at, at < half, dtype)
        rest = _affine(rest * factor, weight + rest_at, bias + rest_at, rest_at < WIDTH, dtype)
        left, right = turned(left, right, cos + at, sin + at, at < half, dtype)
        out = normed + token * WIDTH
        tl.store(out + at, left, mask=at < half)
        tl.store(out + half + at, right, mask=at < half)
        tl.store(out + rest_at, rest.to(dtype), mask=rest_at < WIDTH)


@triton.jit
def _affine(x, weight, bias, inside, dtype: tl.constexpr):
    """Returns x times weights plus biases, rounded to the dtype, as float32."""
    x = x * tl.load(weight, mask=inside, other=0.0) + tl.load(bias, mask=inside, other=0.0)
    return x.to(dtype).to(tl.float32)


@triton.jit
def keep_index_keys(
    keys,  # [num_tokens, WIDTH]
    index_pool,  # [num_blocks, BLOCK_SIZE, 1, WIDTH], strided
    slots,  # [num_tokens] int64
    block_stride,
    token_stride,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens,)."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    slot = tl.load(slots + token)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    key = tl.load(keys + token * WIDTH + d, mask=d < WIDTH)
    tl.store(index_pool + place + d, key.to(index_pool.dtype.element_ty), mask=d < WIDTH)


@triton.jit
def _num_seen(token, seq, query_starts, context_lens):
    """Returns how many keys a token sees; 0 for padding."""
    return tl.load(context_lens + seq) - tl.load(query_starts + seq + 1) + token + 1


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["token_seqs", "query_starts", "context_lens", "block_table", "table_starts"],
)
def score_keys(
    queries,  # [num_tokens, NUM_HEADS, WIDTH]
    weights,  # [num_tokens, NUM_HEADS] float32
    index_pool,  # [num_blocks, BLOCK_SIZE, 1, WIDTH], strided
    scores,  # [tokens of this launch, score_stride] float32
    token_seqs,  # [num_tokens]: each token's sequence
    query_starts,
    context_lens,
    block_table,
    table_starts,
    first_token,
    score_stride,
    block_stride,
    token_stride,
    MOST: tl.constexpr,  # a token that sees no more keys needs no scores
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, spans). Each program scores SPAN keys of one token, whose heads are the rows of its tile."""
    begin(PDL)
    token = first_token + tl.program_id(0)
    seq = tl.load(token_seqs + token)
    num_seen = _num_seen(token, seq, query_starts, context_lens)
    lo = tl.program_id(1) * SPAN
    hi = tl.minimum(lo + SPAN, num_seen)
    if (num_seen > MOST) & (lo < hi):
        h = tl.arange(0, HEADS)
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, D)
        table = block_table + tl.load(table_starts + seq)
        rows = token.to(tl.int64) * NUM_HEADS + h
        there = (h < NUM_HEADS)[:, None] & (d < WIDTH)[None, :]
        q = tl.load(queries + (rows * WIDTH)[:, None] + d[None, :], mask=there, other=0.0)
        weight = tl.load(weights + rows, mask=h < NUM_HEADS, other=0.0)
        out = scores + tl.program_id(0).to(tl.int64) * score_stride
        for start in range(lo, hi, BLOCK_N):
            at = start + n
            is_key = at < hi
            block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            place = block * block_stride + at % BLOCK_SIZE * token_stride
            k = tl.load(
                index_pool + place[:, None] + d[None, :], mask=is_key[:, None] & (d < WIDTH)[None, :], other=0.0
            ).to(q.dtype)
            products = tl.maximum(tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)  # [HEADS, BLOCK_N]
            tl.store(out + at, tl.sum(products * weight[:, None], axis=0), mask=is_key)


@triton.jit
def _number_of(score):
    """Maps scores to int32 in the same order; zeros of both signs are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _next_digit(scores, num_seen, found, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the next eight bits of the smallest number to choose. `found`: its bits before these; 0 if there are none.

    `wanted`: how many numbers to choose among those that begin with `found`. Returns `found` with the new bits
    appended, and how many numbers to choose among those that begin with this result.
    """
    values = tl.arange(0, NUM_VALUES)
    counts = tl.zeros([NUM_VALUES], tl.int32)
    for start in range(0, num_seen, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_counted = at < num_seen
        number = _number_of(tl.load(scores + at, mask=is_counted, other=0.0))
        if SHIFT == 24:  # the first eight bits include the sign
            own = (number >> SHIFT) + 128
        else:
            own = (number >> SHIFT) & 255
            is_counted = is_counted & ((number >> (SHIFT + 8)) == found)
        counts += tl.histogram(own, NUM_VALUES, mask=is_counted)
    larger = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    value = tl.max(tl.where(larger + counts >= wanted, values, 0), axis=0)
    left = wanted - tl.sum(tl.where(values == value, larger, 0), axis=0)
    if SHIFT == 24:
        value -= 128
    return found * 256 + value, left


@triton.jit
def _worst_chosen(scores, num_scores, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the MOST-th largest number, and how many numbers equal to it are chosen."""
    worst, wanted = _next_digit(scores, num_scores, 0, MOST, 24, BLOCK)
    worst, wanted = _next_digit(scores, num_scores, worst, wanted, 16, BLOCK)
    worst, wanted = _next_digit(scores, num_scores, worst, wanted, 8, BLOCK)
    return _next_digit(scores, num_scores, worst, wanted, 0, BLOCK)


@triton.jit
def _chosen(scores, at, num_scores, worst, wanted, num_chosen, num_equal):
    """Returns a tile of scores, which of them are chosen, the places of these, and both counts after the tile."""
    score = tl.load(scores + at, mask=at < num_scores, other=0.0)
    number = _number_of(score)
    is_equal = (at < num_scores) & (number == worst)
    in_turn = num_equal + tl.cumsum(is_equal.to(tl.int32), axis=0)
    is_chosen = (at < num_scores) & ((number > worst) | (is_equal & (in_turn <= wanted)))
    place = num_chosen + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    num_chosen += tl.sum(is_chosen.to(tl.int32), axis=0)
    num_equal += tl.sum(is_equal.to(tl.int32), axis=0)
    return score, is_chosen, place, num_chosen, num_equal


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["token_seqs", "query_starts", "context_lens"],
)
def keep_best(
    scores,  # [tokens of this launch, score_stride] float32
    best,  # [tokens of this launch, best_stride] float32, out: MOST of each part; the last part may have fewer
    best_at,  # the same, int32: their keys
    token_seqs,
    query_starts,
    context_lens,
    first_token,
    score_stride,
    best_stride,
    MOST: tl.constexpr,
    PART: tl.constexpr,  # keys in a part; more than MOST
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, parts). Finds the best keys in a part of PART keys of a token, in the order of the keys."""
    begin(PDL)
    token = first_token + tl.program_id(0)
    seq = tl.load(token_seqs + token)
    num_seen = _num_seen(token, seq, query_starts, context_lens)
    first = tl.program_id(1) * PART
    num_scores = tl.minimum(num_seen - first, PART)
    if (num_seen > MOST) & (num_scores > 0):
        scores += tl.program_id(0).to(tl.int64) * score_stride + first
        out = tl.program_id(0).to(tl.int64) * best_stride + tl.program_id(1) * MOST
        worst = -2147483648
        wanted = num_scores
        if num_scores > MOST:
            worst, wanted = _worst_chosen(scores, num_scores, MOST, BLOCK)
        num_chosen = 0
        num_equal = 0
        for start in range(0, num_scores, BLOCK):
            at = start + tl.arange(0, BLOCK)
            score, is_chosen, place, num_chosen, num_equal = _chosen(
                scores, at, num_scores, worst, wanted, num_chosen, num_equal
            )
            tl.store(best + out + place, score, mask=is_chosen)
            tl.store(best_at + out + place, first + at, mask=is_chosen)


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["token_seqs", "query_starts", "context_lens", "block_table", "table_starts"],
)
def list_keys(
    scores,  # [tokens of this launch, score_stride] float32: of all keys; with PART, of the keys from `keep_best`
    keys,  # the same, int32: the keys from `keep_best`; read only with PART
    listed,  # [num_tokens, MOST]: slots, out
    nums_listed,  # [num_tokens], out
    token_seqs,
    query_starts,
    context_lens,
    block_table,
    table_starts,
    first_token,
    score_stride,
    MOST: tl.constexpr,
    PART: tl.constexpr,  # 0: the scores are those of all keys
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens,). A token that sees at most MOST keys gets all of them."""
    begin(PDL)
    token = first_token + tl.program_id(0)
    seq = tl.load(token_seqs + token)
    num_seen = _num_seen(token, seq, query_starts, context_lens)
    table = block_table + tl.load(table_starts + seq)
    out = listed + token.to(tl.int64) * MOST
    tl.store(nums_listed + token, tl.minimum(num_seen, MOST))
    if num_seen <= MOST:
        for start in range(0, num_seen, BLOCK):
            at = start + tl.arange(0, BLOCK)
            block = tl.load(table + at // BLOCK_SIZE, mask=at < num_seen, other=0)
            tl.store(out + at, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=at < num_seen)
    else:
        num_scores = num_seen
        if PART > 0:
            last = tl.cdiv(num_seen, PART) - 1
            num_scores = last * MOST + tl.minimum(num_seen - last * PART, MOST)
        own = tl.program_id(0).to(tl.int64) * score_stride
        worst, wanted = _worst_chosen(scores + own, num_scores, MOST, BLOCK)
        num_chosen = 0
        num_equal = 0
        for start in range(0, num_scores, BLOCK):
            at = start + tl.arange(0, BLOCK)
            _, is_chosen, place, num_chosen, num_equal = _chosen(
                scores + own, at, num_scores, worst, wanted, num_chosen, num_equal
            )
            key = at
            if PART > 0:
                key = tl.load(keys + own + at, mask=is_chosen, other=0)
            block = tl.load(table + key // BLOCK_SIZE, mask=is_chosen, other=0)
            tl.store(out + place, block * BLOCK_SIZE + key % BLOCK_SIZE, mask=is_chosen)
