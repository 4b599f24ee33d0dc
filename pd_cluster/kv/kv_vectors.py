"""Converts vectors of keys and values between plain values and the form in which a pool stores them.

A coded vector consists of its codes and one float32 scale, as bytes. A value is code * scale. Each token and head has
its own scale, so a vector's bytes depend only on that vector. native/pool_vectors.h produces the same bytes.

- int8: codes from -127 to 127. fp8_e4m3: codes up to 448.
- int4: codes from -7 to 7, stored as code + 8. The low bits of the bytes hold the codes of the vector's first half, the
  high bits those of its second half.
- A vector with an infinity or NaN gets the scale NaN. A vector whose largest magnitude is below 2^-100 becomes zeros.
"""

from __future__ import annotations

import torch

from pd_cluster.kv.kv_layout import CODE_BITS, SCALE_NBYTES
from pd_cluster.kv.pool_memory import TORCH_DTYPES

MOST = {"int8": 127.0, "fp8_e4m3": 448.0, "int4": 7.0}  # the largest code of each dtype
SMALLEST = 2.0**-100
INT4_OFFSET = 8


def convert(stored: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Converts stored vectors [..., stored width] of a pool of dtype `source` to those of dtype `target`."""
    return stored if source == target else encode(decode(stored, source), target)


def encode(vectors: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns plain vectors [..., width] as a pool of this dtype stores them: [..., stored width]."""
    if dtype not in CODE_BITS:
        return vectors.to(TORCH_DTYPES[dtype])
    x = vectors.float()
    most = x.abs().amax(-1, keepdim=True)
    is_finite = most.isfinite()
    largest = torch.full_like(most, MOST[dtype])  # dividing a tensor by a Python number may round twice
    inverse = torch.where(is_finite & (most >= SMALLEST), largest / most, 0.0)
    scale = torch.where(is_finite, most / largest, torch.nan)
    codes = _codes(torch.where(inverse > 0, x * inverse, 0.0), dtype)
    return torch.cat([codes, scale.contiguous().view(torch.uint8)], dim=-1)


def decode(stored: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns stored vectors of a pool of this dtype as plain values [..., width]: float32 if they are codes."""
    if dtype not in CODE_BITS:
        return stored
    codes = stored[..., :-SCALE_NBYTES]
    scale = stored[..., -SCALE_NBYTES:].contiguous().view(torch.float32)
    if dtype == "int8":
        return codes.contiguous().view(torch.int8) * scale
    if dtype == "fp8_e4m3":
        return codes.contiguous().view(torch.float8_e4m3fn).float() * scale
    return (torch.cat([codes & 15, codes >> 4], dim=-1).to(torch.int8) - INT4_OFFSET) * scale


def _codes(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rounds to the nearest codes, ties to even. Returns the codes as bytes."""
    if dtype == "fp8_e4m3":
        return x.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = x.round().to(torch.int8)
    if dtype == "int8":
        return codes.view(torch.uint8)
    low, high = (codes + INT4_OFFSET).view(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def write_kv(
    keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor,
    key_pool: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,  # [num_tokens] int64: block * block_size + offset
) -> None:
    """Writes the step's keys and values into their slots, in the pool's precision."""
    block, offset = slot_mapping // key_pool.shape[1], slot_mapping % key_pool.shape[1]
    key_pool.index_put_((block, offset), keys.to(key_pool.dtype))
    value_pool.index_put_((block, offset), values.to(value_pool.dtype))
