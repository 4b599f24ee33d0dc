"""The Triton kernel that writes a step's keys and values into the pool."""

from __future__ import annotations

import triton
import triton.language as tl


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
