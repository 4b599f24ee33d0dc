"""Tile sizes of the attention kernels: one table, by head size, precision and GPU generation.

The choice depends on nothing else, so every process and every run computes the same results. Independent of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_HEAD_DIM = 256
MAX_GROUP = 32  # query heads per KV head
MIN_ROWS = 16  # the minimum for a matrix product
MAX_SUMS_OF_4_WARPS = 4096  # sums in a decode tile, rows times padded head_dim: above it, four warps spill registers
Arch = Literal[80, 90]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile of `rows` queries and `keys` keys of the context; both numbers are powers of two."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LatentTile:
    """Latent attention: the `group` query heads of a program read the same latents, which have `width` numbers and are
    also the values, and the same rotated parts of keys, which have `rope_width` numbers.
    """

    group: int
    width: int
    rope_width: int


@dataclass(frozen=True, slots=True)
class AttentionConfigs:
    """`is_uniform`: prefill masks every tile of keys, so that all queries execute the same instructions."""

    prefill: TileConfig
    decode: TileConfig
    is_uniform: bool = False
    latent: LatentTile | None = None


# (padded head_dim, bits of an element, arch) -> rows, keys, warps, stages of prefill; keys, warps, stages of decode
# Chosen from ptxas output, not from measurements yet: no spills, at least eight decode warps per multiprocessor. Two
# stages are used only where more do not fit: with two, no load overlaps the computation of a tile.
_TABLE: dict[tuple[int, int, Arch], tuple[tuple[int, int, int, int], tuple[int, int, int]]] = {
    (64, 16, 90): ((128, 64, 8, 3), (64, 4, 4)),
    (128, 16, 90): ((128, 128, 8, 3), (64, 4, 3)),
    (256, 16, 90): ((128, 32, 8, 3), (32, 4, 3)),
    (64, 16, 80): ((128, 32, 4, 3), (64, 4, 4)),
    (128, 16, 80): ((128, 32, 8, 3), (64, 4, 3)),
    (256, 16, 80): ((64, 32, 8, 2), (32, 4, 3)),
    (64, 32, 90): ((32, 32, 8, 2), (32, 4, 3)),
    (128, 32, 90): ((32, 16, 8, 3), (16, 8, 3)),
    (256, 32, 90): ((16, 16, 8, 2), (16, 8, 2)),
    (64, 32, 80): ((32, 32, 8, 2), (32, 4, 3)),
    (128, 32, 80): ((32, 16, 8, 3), (16, 8, 3)),
    (256, 32, 80): ((16, 16, 8, 2), (16, 8, 2)),
}


def padded(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and at least 16."""
    return max(MIN_ROWS, 1 << (size - 1).bit_length())


def configs_for(
    head_dim: int, dtype_bits: int, group: int, compute_capability: tuple[int, int], has_codes: bool = False
) -> AttentionConfigs:
    """Returns the configs; `group`: query heads per KV head. `has_codes`: the pool is quantized, and decoding codes
    needs registers.

    Raises ValueError for shapes that the kernels do not support.
    """
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim {head_dim}: the Triton attention supports multiples of 8 up to {MAX_HEAD_DIM}")
    if not 0 < group <= MAX_GROUP:
        raise ValueError(f"{group} query heads per KV head: the Triton attention supports 1 to {MAX_GROUP}")
    # Consumer GPUs, even those newer than Hopper, have 99 KiB of shared memory; the configs for arch 80 fit in that.
    arch: Arch = 90 if 9 <= compute_capability[0] <= 11 else 80
    (rows, *of_prefill), of_decode = _TABLE[max(64, padded(head_dim)), dtype_bits, arch]
    keys, num_warps, num_stages = of_decode
    if padded(group) * padded(head_dim) > MAX_SUMS_OF_4_WARPS:
        num_warps = 8
    if has_codes:
        of_prefill[0], keys = max(MIN_ROWS, of_prefill[0] // 2), max(MIN_ROWS, keys // 2)
    decode = TileConfig(padded(group), keys, num_warps, num_stages)
    return AttentionConfigs(TileConfig(max(rows, padded(group)), *of_prefill), decode)


# The same table for latents, by (bits of an element, arch). The sums of 16 heads with 512 numbers each take a quarter
# of the registers of eight warps; the sums of 64 rows take all of them.
MAX_LATENT, MAX_LATENT_ROPE, MAX_LATENT_GROUP = 512, 128, 16
_LATENT_TABLE: dict[tuple[int, Arch], tuple[tuple[int, int, int, int], tuple[int, int, int]]] = {
    (16, 90): ((64, 32, 8, 2), (32, 8, 2)),
    (16, 80): ((32, 16, 8, 2), (32, 8, 2)),
    (32, 90): ((16, 16, 8, 2), (16, 8, 2)),
    (32, 80): ((16, 16, 8, 1), (16, 8, 1)),
}


def latent_group(num_heads: int) -> int:
    """Returns the number of query heads per program: the largest divisor of `num_heads` that is at most 16."""
    return largest_divisor(num_heads, MAX_LATENT_GROUP)


def largest_divisor(num_heads: int, most: int) -> int:
    return max(size for size in range(1, most + 1) if num_heads % size == 0)


def latent_configs_for(
    num_heads: int,
    widths: tuple[int, int],
    dtype_bits: int,
    compute_capability: tuple[int, int],
    has_codes: bool = False,
) -> AttentionConfigs:
    """Returns the configs; `widths`: of a latent, and of its rotated part. `has_codes`: the pool is quantized.

    Raises ValueError for shapes that the kernels do not support.
    """
    for name, width, most in zip(("latents", "rotated parts"), widths, (MAX_LATENT, MAX_LATENT_ROPE), strict=True):
        if not 0 < width <= most or width % 8:
            raise ValueError(f"{name} of {width} numbers: the Triton attention supports multiples of 8 up to {most}")
    arch: Arch = 90 if 9 <= compute_capability[0] <= 11 else 80
    (rows, *of_prefill), (keys, *of_decode) = _LATENT_TABLE[dtype_bits, arch]
    if has_codes:
        rows, of_prefill[0], keys = max(MIN_ROWS, rows // 2), MIN_ROWS, MIN_ROWS
    prefill, decode = TileConfig(rows, *of_prefill), TileConfig(MIN_ROWS, keys, *of_decode)
    return AttentionConfigs(prefill, decode, latent=LatentTile(latent_group(num_heads), *widths))
