"""Triton kernels between a decoder's linear layers: norms, the gate, and the preparation of heads from QKV rows.

All arithmetic is float32; values are rounded to the activations' dtype wherever transformers' modules round them.
Launch sizes are chosen in `pd_cluster.model.kernels.cuda.ops`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.attention.quantized_kv import store_codes
from pd_cluster.model.kernels.cuda.dependent_launch import begin
from pd_cluster.model.layers.gated_mlp import Activation

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of activations
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "swigluoai": 2}  # their numbers in `activated`


@triton.jit
def scaled(normed, weight, dtype: tl.constexpr):
    """Multiplies by the weight.

    Llama rounds first and multiplies by a weight of the activations' dtype; Gemma's weight is float32.
    """
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return normed * weight.to(tl.float32)


@triton.jit
def rms_norm(
    x,
    delta,
    weight,
    out,
    x_stride,
    delta_stride,
    eps,
    NUM_FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes one row: x += delta, out = norm(x)."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < NUM_FEATURES
    begin(PDL)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        due = tl.load(delta + row * delta_stride + at, mask=inside, other=0.0).to(tl.float32)
        value = (value + due).to(dtype)
        tl.store(x + row * x_stride + at, value, mask=inside)
        value = value.to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    variance = tl.sum(value * value, axis=0) / NUM_FEATURES
    normed = scaled(value * tl.rsqrt(variance + eps), factor, dtype)
    tl.store(out + row * NUM_FEATURES + at, normed.to(dtype), mask=inside)


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Returns activation(gate) * up, with float32 in and out; the activation is rounded before the product.

    swigluoai (2) first clamps both, and multiplies by up + 1, which is also rounded.
    """
    if ACTIVATION == 2:
        gate = tl.minimum(gate, 7.0)
        up = (tl.maximum(tl.minimum(up, 7.0), -7.0) + 1.0).to(dtype).to(tl.float32)
        exponent = 1.702 * gate
    elif ACTIVATION == 1:  # 0.5 * x * (1 + tanh(u)) is x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        exponent = gate
    gate = gate / (1.0 + tl.exp(-exponent))
    return gate.to(dtype).to(tl.float32) * up


@triton.jit
def gated(
    gate_up,
    out,
    row_stride,
    NUM_FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a part of one row."""
    begin(PDL)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < NUM_FEATURES
    source = gate_up + row * row_stride + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + NUM_FEATURES, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * NUM_FEATURES + at, activated(gate, up, dtype, ACTIVATION).to(dtype), mask=inside)


@triton.jit
def rotated(
    source,  # [HEADS, HALF] pointers to the left halves
    inside,
    weight,
    cos,  # pointer to a row, as is sin
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Returns the left and right halves of some heads after norm and rotation, as float32 rounded to the dtype."""
    dtype: tl.constexpr = source.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    at = tl.arange(0, HALF)[None, :]
    if HAS_NORM:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        left_weight = tl.load(weight + at, mask=at < half, other=0.0)
        right_weight = tl.load(weight + half + at, mask=at < half, other=0.0)
        left = scaled(left * factor, left_weight, dtype).to(dtype).to(tl.float32)
        right = scaled(right * factor, right_weight, dtype).to(dtype).to(tl.float32)
    return turned(left, right, cos + at, sin + at, at < half, dtype)


@triton.jit
def turned(left, right, cos, sin, inside, dtype: tl.constexpr):
    """Returns the halves rotated; `cos`, `sin` [1, HALF] are pointers, and products are rounded to their dtype."""
    table: tl.constexpr = cos.dtype.element_ty
    c = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    turned_left = (left * c).to(table).to(tl.float32) - (right * s).to(table).to(tl.float32)
    turned_right = (right * c).to(table).to(tl.float32) + (left * s).to(table).to(tl.float32)
    return turned_left.to(dtype), turned_right.to(dtype)


@triton.jit
def prepare_heads(
    qkv,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    cos,  # [num_tokens, HEAD_DIM]; the two halves are equal
    sin,
    q_weight,
    k_weight,
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_pool,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM], strided
    value_pool,
    slots,  # [num_tokens]
    qkv_stride,
    rope_stride,
    block_stride,
    offset_stride,
    head_stride,
    q_eps,
    k_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CODES: tl.constexpr,  # quantized_kv.CODES; 0: the pool is not quantized
    PDL: tl.constexpr,
):
    """Each program processes one token and HEADS of its query heads, or of its key and value heads."""
    begin(PDL)
    half: tl.constexpr = HEAD_DIM // 2
    query_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = tl.arange(0, HALF)[None, :]
    cos += token * rope_stride
    sin += token * rope_stride
    qkv += token * qkv_stride
    if tile < query_tiles:
        head = (tile * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < NUM_HEADS) & (at < half)
        left, right = rotated(qkv + head * HEAD_DIM + at, inside, q_weight, cos, sin, q_eps, HEAD_DIM, HALF, HAS_NORM)
        target = query + (token * NUM_HEADS + head) * HEAD_DIM + at
        tl.store(target, left, mask=inside)
        tl.store(target + half, right, mask=inside)
    else:
        head = ((tile - query_tiles) * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < NUM_KV_HEADS) & (at < half)
        source = qkv + (NUM_HEADS + head) * HEAD_DIM + at
        slot = tl.load(slots + token)
        place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * offset_stride + head * head_stride
        left, right = rotated(source, inside, k_weight, cos, sin, k_eps, HEAD_DIM, HALF, HAS_NORM)
        pool_dtype: tl.constexpr = key_pool.dtype.element_ty
        if CODES > 0:
            is_vector = head < NUM_KV_HEADS
            store_codes(key_pool + place, at, left.to(tl.float32), right.to(tl.float32), is_vector, HEAD_DIM, CODES)
        else:
            tl.store(key_pool + place + at, left.to(tl.float32).to(pool_dtype), mask=inside)
            tl.store(key_pool + place + half + at, right.to(tl.float32).to(pool_dtype), mask=inside)
        source += NUM_KV_HEADS * HEAD_DIM
        value_left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        value_right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        if CODES > 0:
            store_codes(value_pool + place, at, value_left, value_right, head < NUM_KV_HEADS, HEAD_DIM, CODES)
        else:
            tl.store(value_pool + place + at, value_left.to(pool_dtype), mask=inside)
            tl.store(value_pool + place + half + at, value_right.to(pool_dtype), mask=inside)
