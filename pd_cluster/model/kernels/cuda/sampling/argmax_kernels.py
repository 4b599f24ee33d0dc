"""Triton kernels that find the largest logit of each row in two stages. See argmax.py."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
NO_ID = tl.constexpr(2147483647)


@triton.jit
def best_of_parts(
    logits,  # [num_rows, vocab_size]
    values,  # [num_rows, num_parts] float32
    token_ids,  # [num_rows, num_parts] int32
    irregular,  # [num_rows, num_parts] int8
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program reduces BLOCK logits of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB_SIZE
    value = tl.load(logits + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    odd = (value != value) | (value == float("inf"))
    value = tl.where(value != value, float("-inf"), tl.where(value > LARGEST, LARGEST, value))
    best = tl.max(value, axis=0)
    out = row * tl.num_programs(1) + part
    tl.store(values + out, best)
    tl.store(token_ids + out, tl.min(tl.where(value == best, at, NO_ID), axis=0))
    tl.store(irregular + out, tl.max(odd.to(tl.int32), axis=0).to(tl.int8))


@triton.jit
def best_of_rows(
    values,
    token_ids,
    irregular,
    best,  # [num_rows] float32
    best_ids,  # [num_rows] int64
    found_irregular,  # [num_rows] bool
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program reduces the parts of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < NUM_PARTS
    source = row * NUM_PARTS + at
    value = tl.load(values + source, mask=inside, other=float("-inf"))
    token_id = tl.load(token_ids + source, mask=inside, other=NO_ID)
    odd = tl.load(irregular + source, mask=inside, other=0).to(tl.int32)
    top = tl.max(value, axis=0)
    nothing = top == float("-inf")
    chosen = tl.min(tl.where(value == top, token_id, NO_ID), axis=0)
    tl.store(best + row, tl.where(nothing, 0.0, top))
    tl.store(best_ids + row, tl.where(nothing, 0, chosen).to(tl.int64))
    tl.store(found_irregular + row, (tl.max(odd, axis=0) > 0) | nothing)
