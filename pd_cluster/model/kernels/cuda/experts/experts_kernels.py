"""Triton kernels of a sparse MLP: routing, sorting by expert, and one grouped product each for gate_up and down.

A pair is a row and one of the `TOP_K` experts chosen for it; pair i belongs to row i // TOP_K. Sorted pairs are ordered
by expert; those of expert e are [starts[e], starts[e + 1]). Launch sizes are chosen in
`pd_cluster.model.kernels.cuda.experts.grouped_experts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.elementwise_kernels import activated
from pd_cluster.model.kernels.cuda.linear.linear_kernels import product, tile_of
from pd_cluster.model.kernels.cuda.linear.quantized_linear_kernels import PLAIN, ROUNDED, coded_sum, scaled_sum


@triton.jit(do_not_specialize=["num_rows"])
def route(
    logits,  # [num_rows, NUM_EXPERTS]
    chosen,  # [num_rows, TOP_K] int32
    weights,  # [num_rows, TOP_K] float32
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
):
    """Each program routes ROWS rows. Among equal scores the lowest expert is first; a row of NaN gets valid experts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS_BLOCK)[None, :]
    rank = tl.arange(0, TOP_K_BLOCK)[None, :]
    exists = expert < NUM_EXPERTS
    source = logits + row.to(tl.int64)[:, None] * NUM_EXPERTS + expert
    score = tl.load(source, mask=(row < num_rows)[:, None] & exists, other=0.0).to(tl.float32)
    score = tl.where(exists, score, float("-inf"))
    mass = tl.exp(score - tl.max(score, axis=1)[:, None])
    left = tl.where(exists, mass / tl.sum(mass, axis=1)[:, None], -1.0)
    picked = tl.zeros((ROWS, TOP_K_BLOCK), dtype=tl.float32)
    picked_experts = tl.zeros((ROWS, TOP_K_BLOCK), dtype=tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(left, axis=1)[:, None]
        found = tl.min(tl.where(left == best, expert, NUM_EXPERTS - 1), axis=1)[:, None]
        picked = tl.where(rank == i, best, picked)
        picked_experts = tl.where(rank == i, found, picked_experts)
        left = tl.where(expert == found, -1.0, left)
    if RENORMALISE:
        picked = picked / tl.sum(picked, axis=1)[:, None]
    if ROUND:
        picked = picked.to(logits.dtype.element_ty).to(tl.float32)
    target = row.to(tl.int64)[:, None] * TOP_K + rank
    stored = (row < num_rows)[:, None] & (rank < TOP_K)
    tl.store(chosen + target, picked_experts, mask=stored)
    tl.store(weights + target, picked, mask=stored)


@triton.jit(do_not_specialize=["num_pairs", "num_pair_tiles"])
def sort_pairs(
    chosen,  # [num_pairs] int32
    order,  # [num_pairs] int32: sorted pairs
    starts,  # [NUM_EXPERTS + 1] int32
    num_pairs,
    num_pair_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes each pair to its position: the number of pairs of lower experts plus earlier pairs of the same expert.

    Further programs do the same for an imaginary first pair of each expert, whose position is the expert's start.
    """
    tile = tl.program_id(0)
    if tile < num_pair_tiles:
        pair = tile * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(chosen + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
    else:
        pair = tl.full((BLOCK,), -1, dtype=tl.int32)
        own = (tile - num_pair_tiles) * BLOCK + tl.arange(0, BLOCK)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_pairs, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = tl.load(chosen + other, mask=other < num_pairs, other=NUM_EXPERTS + BLOCK)
        same = others[None, :] == own[:, None]
        before = (others[None, :] < own[:, None]) | (same & (other[None, :] < pair[:, None]))
        place += tl.sum(before.to(tl.int32), axis=1)
    if tile < num_pair_tiles:
        tl.store(order + place, pair, mask=pair < num_pairs)
    else:
        tl.store(starts + own, place, mask=own <= NUM_EXPERTS)


@triton.jit
def rows_of_tile(starts, row_tile, NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns (expert, first sorted pair, end of the expert's pairs); no pairs if the tile is not needed."""
    expert = tl.arange(0, EXPERTS_BLOCK)
    exists = expert < NUM_EXPERTS
    start = tl.load(starts + expert, mask=exists, other=0)
    stop = tl.load(starts + expert + 1, mask=exists, other=0)
    num_tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(num_tiles, axis=0)
    own = exists & (ends > row_tile) & (ends - num_tiles <= row_tile)
    found = tl.sum(tl.where(own, expert, 0), axis=0)
    first = tl.sum(tl.where(own, start + (row_tile - (ends - num_tiles)) * BLOCK_M, 0), axis=0)
    return found, first, tl.sum(tl.where(own, stop, 0), axis=0)


@triton.jit
def any_product(
    x,  # [BLOCK_M, 1] pointers to rows of NUM_INPUTS
    x_scales,  # [BLOCK_M, 1] pointers, read if KIND is ROUNDED
    matrices,
    scales,
    zeros,
    row,  # [1, BLOCK_N] int64: rows of all experts' matrices
    NUM_INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns x @ matrix.T, [BLOCK_M, BLOCK_N] float32, for floats and codes."""
    if KIND == PLAIN:
        result = product(x, matrices + row * NUM_INPUTS, NUM_INPUTS, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        result = coded_sum(
            x, tl.full((BLOCK_M, 1), 1, tl.int1), matrices, scales, zeros, row,
            0, (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K,
            NUM_INPUTS, WIDTH, GROUP_SIZE, NUM_GROUPS, KIND, HAS_ZEROS, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if KIND == ROUNDED:
            result = scaled_sum(result, tl.load(x_scales), scales, zeros, row, HAS_ZEROS)
    return result


@triton.jit(do_not_specialize=["num_row_tiles"])
def gate_up_product(
    x,  # [num_rows, HIDDEN_SIZE]
    x_scales,  # [num_rows] float32, read if KIND is ROUNDED
    matrices,  # [NUM_EXPERTS, 2 * NUM_FEATURES, HIDDEN_SIZE], or codes
    scales,  # of codes
    zeros,
    biases,  # [NUM_EXPERTS, 2 * NUM_FEATURES], read if HAS_BIAS
    out,  # [num_pairs, NUM_FEATURES], sorted
    order,
    starts,
    x_stride,
    num_row_tiles,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,  # for this and the next five arguments see `coded_sum`
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,  # PLAIN: matrices are floats
    HAS_ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program computes BLOCK_N columns for BLOCK_M sorted pairs: the gates and ups of BLOCK_N / 2 features,
    interleaved.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    features: tl.constexpr = BLOCK_N // 2
    row_tile, column_tile = tile_of(num_row_tiles, (NUM_FEATURES + features - 1) // features, GROUP)
    expert, first, stop = rows_of_tile(starts, row_tile, NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if first < stop:
        place = first + tl.arange(0, BLOCK_M)
        row = tl.load(order + tl.minimum(place, stop - 1)).to(tl.int64) // TOP_K
        column = tl.arange(0, BLOCK_N)
        feature = tl.minimum(column_tile * features + column // 2, NUM_FEATURES - 1)
        matrix_row = expert.to(tl.int64) * (2 * NUM_FEATURES) + (column % 2) * NUM_FEATURES + feature
        result = any_product(
            x + row[:, None] * x_stride, x_scales + row[:, None], matrices, scales, zeros, matrix_row[None, :],
            HIDDEN_SIZE, WIDTH, GROUP_SIZE, NUM_GROUPS, KIND, HAS_ZEROS, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            result = result + tl.load(biases + matrix_row).to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(result.to(dtype).to(tl.float32), (BLOCK_M, features, 2)))
        at = column_tile * features + tl.arange(0, features)
        target = out + place.to(tl.int64)[:, None] * NUM_FEATURES + at[None, :]
        stored = (place < stop)[:, None] & (at < NUM_FEATURES)[None, :]
        tl.store(target, activated(gate, up, dtype, ACTIVATION).to(dtype), mask=stored)


@triton.jit(do_not_specialize=["num_row_tiles"])
def down_product(
    x,  # [num_pairs, NUM_FEATURES], sorted
    x_scales,  # [num_pairs] float32, read if KIND is ROUNDED
    matrices,  # [NUM_EXPERTS, HIDDEN_SIZE, NUM_FEATURES], or codes
    scales,  # of codes
    zeros,
    biases,  # [NUM_EXPERTS, HIDDEN_SIZE], read if HAS_BIAS
    weights,  # [num_pairs] float32
    out,  # [num_pairs, HIDDEN_SIZE]
    order,
    starts,
    num_row_tiles,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,  # for this and the next five arguments see `coded_sum`
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,  # PLAIN: matrices are floats
    HAS_ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program computes BLOCK_N columns for BLOCK_M sorted pairs, and stores weighted results in pair order."""
    dtype: tl.constexpr = out.dtype.element_ty
    row_tile, column_tile = tile_of(num_row_tiles, (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert, first, stop = rows_of_tile(starts, row_tile, NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if first < stop:
        place = first + tl.arange(0, BLOCK_M)
        row = tl.minimum(place, stop - 1).to(tl.int64)
        at = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        matrix_row = expert.to(tl.int64) * HIDDEN_SIZE + tl.minimum(at, HIDDEN_SIZE - 1)
        result = any_product(
            x + row[:, None] * NUM_FEATURES, x_scales + row[:, None], matrices, scales, zeros, matrix_row[None, :],
            NUM_FEATURES, WIDTH, GROUP_SIZE, NUM_GROUPS, KIND, HAS_ZEROS, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            result = result + tl.load(biases + matrix_row).to(tl.float32)[None, :]
        pair = tl.load(order + row)
        weighted = result.to(dtype).to(tl.float32) * tl.load(weights + pair)[:, None]
        target = out + pair.to(tl.int64)[:, None] * HIDDEN_SIZE + at[None, :]
        tl.store(target, weighted.to(dtype), mask=(place < stop)[:, None] & (at < HIDDEN_SIZE)[None, :])


@triton.jit
def sum_pairs(
    pairs,  # [num_pairs, NUM_FEATURES]
    chosen,  # [num_pairs] int32, read if HAS_OTHERS
    out,  # [num_rows, NUM_FEATURES]
    NUM_EXPERTS: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds up a part of one row's TOP_K results, in pair order, in float32, and rounds once.

    With HAS_OTHERS, pairs of experts past the end count as zeros and are not read.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        counts = at < NUM_FEATURES
        if HAS_OTHERS:
            counts = counts & (tl.load(chosen + pair) < NUM_EXPERTS)
        total += tl.load(pairs + pair * NUM_FEATURES + at, mask=counts, other=0.0).to(tl.float32)
    tl.store(out + row * NUM_FEATURES + at, total.to(out.dtype.element_ty), mask=at < NUM_FEATURES)
