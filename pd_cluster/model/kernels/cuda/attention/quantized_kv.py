"""Triton functions for vectors of a quantized KV pool (kv/kv_vectors.py): codes and a scale, as bytes.

All bits equal those of `encode` there, on every GPU, because conversions are spelled out. Launches must set
enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.kv.kv_layout import CODE_BITS

# The kernels' constants for quantized pool dtypes; pools of other dtypes hold floats.
CODES = {"int8": 1, "fp8_e4m3": 2, "int4": 3}
NUMBERS = 0


def codes_of(pool_dtype: str) -> int:
    return CODES[pool_dtype] if pool_dtype in CODE_BITS else NUMBERS


@triton.jit
def nearest(x):
    """Rounds |x| < 2^22 to the nearest integer, ties to even."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def scale_at(base, rows, is_seen, HEAD_DIM: tl.constexpr, CODES: tl.constexpr):
    """Returns the scales of vectors that start at `base` + rows; 0 for rows that are not visible."""
    width: tl.constexpr = HEAD_DIM // 2 if CODES == 3 else HEAD_DIM
    return tl.load((base + rows + width).to(tl.pointer_type(tl.float32)), mask=is_seen, other=0.0)


@triton.jit
def decoded(base, rows, there, d, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, CODES: tl.constexpr):
    """Returns codes [rows, D] as exact floats, without their scales."""
    half: tl.constexpr = HEAD_DIM // 2
    if CODES == 3:
        raw = tl.load(base + rows[:, None] + (d % half)[None, :], mask=there, other=0x88)
        number = (((raw.to(tl.int32) >> (4 * (d >= half).to(tl.int32))[None, :]) & 15) - 8).to(tl.float32)
    elif CODES == 2:
        bits = tl.load(base + rows[:, None] + d[None, :], mask=there, other=0).to(tl.int32)
        number = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        raw = tl.load(base + rows[:, None] + d[None, :], mask=there, other=0)
        number = raw.to(tl.int8, bitcast=True).to(tl.float32)
    return number.to(dtype)


@triton.jit
def to_e4m3(x):
    """Returns the code nearest to x, for |x| up to slightly above 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    subnormal = nearest(tl.abs(x) * 512.0).to(tl.int32)  # below 2^-6 codes are 2^-9 apart
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal) | ((bits >> 24) & 128)


@triton.jit
def store_codes(
    target,  # [vectors, 1] pointers to bytes
    at,  # [1, HALF]
    left,  # [vectors, HALF] float32: the first half of each vector, padded with zeros
    right,
    is_vector,  # [vectors, 1]
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
):
    half: tl.constexpr = HEAD_DIM // 2
    most_code: tl.constexpr = 7.0 if CODES == 3 else 448.0 if CODES == 2 else 127.0
    width: tl.constexpr = half if CODES == 3 else HEAD_DIM
    is_regular = (tl.abs(left) < float("inf")) & (tl.abs(right) < float("inf"))  # false also for NaN
    is_finite = (tl.min(is_regular.to(tl.int32), axis=1) == 1)[:, None]
    most = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))[:, None]
    has_codes = is_finite & (most >= 7.888609052210118e-31)  # 2^-100
    inverse = tl.div_rn(tl.full(most.shape, most_code, tl.float32), tl.where(has_codes, most, 1.0))
    scale = tl.where(is_finite, tl.div_rn(most, tl.full(most.shape, most_code, tl.float32)), float("nan"))
    left = tl.where(has_codes, tl.where(has_codes, left, 0.0) * inverse, 0.0)
    right = tl.where(has_codes, tl.where(has_codes, right, 0.0) * inverse, 0.0)
    inside = is_vector & (at < half)
    if CODES == 3:
        byte = (nearest(left) + 8.0).to(tl.int32) | (nearest(right) + 8.0).to(tl.int32) << 4
        tl.store(target + at, byte.to(tl.uint8), mask=inside)
    elif CODES == 2:
        tl.store(target + at, to_e4m3(left).to(tl.uint8), mask=inside)
        tl.store(target + half + at, to_e4m3(right).to(tl.uint8), mask=inside)
    else:
        tl.store(target + at, nearest(left).to(tl.int32).to(tl.uint8), mask=inside)
        tl.store(target + half + at, nearest(right).to(tl.int32).to(tl.uint8), mask=inside)
    tl.store((target + width).to(tl.pointer_type(tl.float32)), scale, mask=is_vector)
