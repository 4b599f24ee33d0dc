"""The Triton kernel that writes a step's keys and values into the pool."""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.attention.quantized_kv import store_codes


@triton.jit
def write_kernel(
    keys,  # [num_tokens, WIDTH]
    values,
    key_pool,
    value_pool,
    slot_mapping,  # [num_tokens] int64
    key_stride,
    value_stride,
    block_stride,
    token_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid: (num_tokens, chunks of WIDTH). WIDTH is num_kv_heads * head_dim."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slot_mapping + token)
    to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + at
    key = tl.load(keys + token * key_stride + at, mask=at < WIDTH)
    value = tl.load(values + token * value_stride + at, mask=at < WIDTH)
    tl.store(key_pool + to, key.to(key_pool.dtype.element_ty), mask=at < WIDTH)
    tl.store(value_pool + to, value.to(value_pool.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def write_codes_kernel(
    keys,  # [num_tokens, num_kv_heads, HEAD_DIM]
    values,
    key_pool,
    value_pool,
    slot_mapping,  # [num_tokens] int64
    key_stride,
    value_stride,
    block_stride,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Grid: (num_tokens, num_kv_heads). Writes a vector of keys and one of values."""
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HALF)[None, :]
    inside = at < half
    is_vector = tl.full((1, 1), 1, tl.int1)
    slot = tl.load(slot_mapping + token)
    to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + head * head_stride
    to = to + tl.zeros((1, 1), tl.int64)
    key = keys + token * key_stride + head * HEAD_DIM + at
    left = tl.load(key, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(key + half, mask=inside, other=0.0).to(tl.float32)
    store_codes(key_pool + to, at, left, right, is_vector, HEAD_DIM, CODES)
    value = values + token * value_stride + head * HEAD_DIM + at
    left = tl.load(value, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(value + half, mask=inside, other=0.0).to(tl.float32)
    store_codes(value_pool + to, at, left, right, is_vector, HEAD_DIM, CODES)
