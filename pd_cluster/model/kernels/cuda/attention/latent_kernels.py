"""Triton kernels around attention to latents: they write latents to the pool, and multiply each head by its matrix.

All arithmetic is float32; values are rounded to the activations' dtype wherever transformers' modules round them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.attention.quantized_kv import store_codes
from pd_cluster.model.kernels.cuda.dependent_launch import begin
from pd_cluster.model.kernels.cuda.elementwise_kernels import rotated, scaled


@triton.jit
def _store_vector(
    target,  # [1, 1] pointer to a vector of the pool
    at,  # [1, HALF]
    left,  # [1, HALF]: the first half of the vector, in the activations' dtype, padded with zeros
    right,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
):
    half: tl.constexpr = WIDTH // 2
    pool_dtype: tl.constexpr = target.dtype.element_ty
    left = left.to(tl.float32)
    right = right.to(tl.float32)
    if CODES > 0:
        store_codes(target, at, left, right, tl.full([1, 1], 1, tl.int1), WIDTH, CODES)
    else:
        tl.store(target + at, left.to(pool_dtype), mask=at < half)
        tl.store(target + half + at, right.to(pool_dtype), mask=at < half)


@triton.jit
def prepare_latents(
    queries,  # [num_tokens, NUM_HEADS * (QUERY_WIDTH + ROPE_WIDTH)], strided
    kept,  # [num_tokens, WIDTH + ROPE_WIDTH], strided
    cos,  # [num_tokens, ROPE_WIDTH]; the two halves are equal
    sin,
    weight,  # [WIDTH]
    absorbed,  # [num_tokens, NUM_HEADS, WIDTH + ROPE_WIDTH]
    latent_pool,  # [num_blocks, BLOCK_SIZE, 1, WIDTH], strided
    rope_pool,  # [num_blocks, BLOCK_SIZE, 1, ROPE_WIDTH], strided
    slots,  # [num_tokens]
    query_stride,
    kept_stride,
    table_stride,
    latent_block_stride,
    latent_token_stride,
    rope_block_stride,
    rope_token_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of a latent, padded
    ROPE_HALF: tl.constexpr,
    CODES: tl.constexpr,  # quantized_kv.CODES; 0: the pool is not quantized
    PDL: tl.constexpr,
):
    """Grid: (num_tokens, 1 + tiles of HEADS heads). A token's first program applies the norm to its latent, rotates the
    rest of its row, and writes both to the pool.

    Each other program rotates the ends of HEADS queries, and writes them after the first WIDTH numbers of `absorbed`.
    """
    begin(PDL)
    rope_half: tl.constexpr = ROPE_WIDTH // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    rope_at = tl.arange(0, ROPE_HALF)[None, :]
    cos += token * table_stride
    sin += token * table_stride
    if tile > 0:
        head = ((tile - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < NUM_HEADS) & (rope_at < rope_half)
        ends = queries + token * query_stride + head * (QUERY_WIDTH + ROPE_WIDTH) + QUERY_WIDTH + rope_at
        # Triton requires one shape for a name that both branches assign, so these names differ from the other branch's.
        query_left, query_right = rotated(ends, inside, weight, cos, sin, eps, ROPE_WIDTH, ROPE_HALF, False)
        target = absorbed + (token * NUM_HEADS + head) * (WIDTH + ROPE_WIDTH) + WIDTH + rope_at
        tl.store(target, query_left, mask=inside)
        tl.store(target + rope_half, query_right, mask=inside)
    else:
        dtype: tl.constexpr = kept.dtype.element_ty
        half: tl.constexpr = WIDTH // 2
        slot = tl.load(slots + token)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        one = tl.zeros([1, 1], tl.int64)
        at = tl.arange(0, HALF)[None, :]
        source = kept + token * kept_stride + at
        left = tl.load(source, mask=at < half, other=0.0).to(tl.float32)
        right = tl.load(source + half, mask=at < half, other=0.0).to(tl.float32)
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        factor = tl.rsqrt(squares / WIDTH + eps)[:, None]
        left = scaled(left * factor, tl.load(weight + at, mask=at < half, other=0.0), dtype).to(dtype)
        right = scaled(right * factor, tl.load(weight + half + at, mask=at < half, other=0.0), dtype).to(dtype)
        place = block * latent_block_stride + offset * latent_token_stride
        if CODES > 0:
            place = tl.multiple_of(place, 4)
        _store_vector(latent_pool + place + one, at, left, right, WIDTH, CODES)
        source = kept + token * kept_stride + WIDTH + rope_at
        left, right = rotated(source, rope_at < rope_half, weight, cos, sin, eps, ROPE_WIDTH, ROPE_HALF, False)
        place = block * rope_block_stride + offset * rope_token_stride
        if CODES > 0:
            place = tl.multiple_of(place, 4)
        _store_vector(rope_pool + place + one, rope_at, left, right, ROPE_WIDTH, CODES)


@triton.jit
def heads_product(
    x,  # [num_rows, num_heads, NUM_INPUTS], strided
    weight,  # [num_heads, NUM_INPUTS, NUM_OUTPUTS]
    out,  # [num_rows, num_heads, NUM_OUTPUTS], strided
    num_rows,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (row tiles, column tiles, heads). A single program adds up each sum, always in the same order."""
    begin(PDL)
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    is_row = (rows < num_rows)[:, None]
    is_column = (columns < NUM_OUTPUTS)[None, :]
    x_at = x + (rows.to(tl.int64) * x_stride + head * x_head_stride)[:, None]
    weight_at = weight + head * NUM_INPUTS * NUM_OUTPUTS + columns[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        k = start + inner
        left = tl.load(x_at + k[None, :], mask=is_row & (k < NUM_INPUTS)[None, :], other=0.0)
        right = tl.load(weight_at + (k * NUM_OUTPUTS)[:, None], mask=(k < NUM_INPUTS)[:, None] & is_column, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    out_at = out + (rows.to(tl.int64) * out_stride + head * out_head_stride)[:, None] + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row & is_column)
