"""The Triton kernel of a linear layer in which a row's result does not depend on the other rows.

A single program computes each output element, as one sum over the inputs in steps of BLOCK_K from first to last. The
caller fixes the tile, so a row runs the same instructions in every batch. The tables of tiles are in
`pd_cluster.model.kernels.cuda.linear.triton_linear`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(num_row_tiles, NUM_COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """Returns this program's row tile and column tile.

    Programs with adjacent numbers share GROUP row tiles, so that both operands stay in the cache.
    """
    at = tl.program_id(0)
    group = at // (GROUP * NUM_COLUMN_TILES)
    first = group * GROUP
    size = tl.minimum(num_row_tiles - first, GROUP)
    within = at - group * (GROUP * NUM_COLUMN_TILES)
    return first + within % size, within // size


@triton.jit
def product(
    a,  # [BLOCK_M, 1] pointers to rows of NUM_INNER elements
    b,  # [1, BLOCK_N] pointers to columns of NUM_INNER elements
    NUM_INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns a @ b, [BLOCK_M, BLOCK_N] float32."""
    inner = tl.arange(0, BLOCK_K)
    result = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, NUM_INNER, BLOCK_K):
        at = first + inner
        if NUM_INNER % BLOCK_K == 0:
            left = tl.load(a + at[None, :])
            right = tl.load(b + at[:, None])
        else:
            left = tl.load(a + at[None, :], mask=(at < NUM_INNER)[None, :], other=0.0)
            right = tl.load(b + at[:, None], mask=(at < NUM_INNER)[:, None], other=0.0)
        result = tl.dot(left, right, result, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["num_rows", "num_row_tiles"])
def linear_product(
    x,  # [num_rows, NUM_INPUTS], contiguous
    weight,  # [NUM_OUTPUTS, NUM_INPUTS], contiguous
    bias,  # [NUM_OUTPUTS]; not read without HAS_BIAS
    out,  # [num_rows, NUM_OUTPUTS], contiguous
    num_rows,
    num_row_tiles,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program computes BLOCK_M rows by BLOCK_N columns. Tiles are padded with copies of the last row."""
    row_tile, column_tile = tile_of(num_row_tiles, (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N, GROUP)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    near_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    near_column = tl.minimum(column, NUM_OUTPUTS - 1).to(tl.int64)
    result = product(
        x + near_row[:, None] * NUM_INPUTS,
        weight + near_column[None, :] * NUM_INPUTS,
        NUM_INPUTS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        result += tl.load(bias + near_column).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * NUM_OUTPUTS + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < NUM_OUTPUTS)[None, :])
