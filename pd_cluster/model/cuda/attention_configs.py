"""Which tiles the attention kernels use: one table, by head size, precision and generation of GPU.

The choice depends on nothing else, so every process and every run computes the same. Knows nothing of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_HEAD_DIM = 256
MAX_GROUP = 32  # query heads of one KV head
MIN_ROWS = 16  # the least that a matrix product takes
Arch = Literal[80, 90]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """`rows` of queries times `keys` of the context at once. Powers of two."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionConfigs:
    prefill: TileConfig
    decode: TileConfig


# (padded head_dim, bits of an element, arch) -> rows, keys, warps, stages of prefill; keys, warps, stages of decode
# Chosen by what ptxas says, not by measurements yet: no spills, two or more decode programs on a multiprocessor. With
# two stages nothing is under way while a tile is computed; that is for what does not fit otherwise.
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
    """The least power of two that is not smaller, at least 16."""
    return max(MIN_ROWS, 1 << (size - 1).bit_length())


def configs_for(head_dim: int, dtype_bits: int, group: int, compute_capability: tuple[int, int]) -> AttentionConfigs:
    """`group`: query heads of one KV head. Raises ValueError for shapes that the kernels do not take."""
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim {head_dim}: the Triton attention takes multiples of 8 up to {MAX_HEAD_DIM}")
    if not 0 < group <= MAX_GROUP:
        raise ValueError(f"{group} query heads to a KV head: the Triton attention takes 1 to {MAX_GROUP}")
    # Consumers' GPUs have 99 KiB of shared memory, newer than Hopper or not: what the table for 80 keeps within.
    arch: Arch = 90 if 9 <= compute_capability[0] <= 11 else 80
    (rows, *of_prefill), of_decode = _TABLE[max(64, padded(head_dim)), dtype_bits, arch]
    return AttentionConfigs(TileConfig(max(rows, padded(group)), *of_prefill), TileConfig(padded(group), *of_decode))
