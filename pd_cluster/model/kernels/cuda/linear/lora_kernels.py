"""Triton kernels of the adapters of a linear layer: x A^T for row blocks of one adapter, then the product with B.

A table holds the addresses of adapters, so launches do not depend on which adapters are loaded. Inputs are split over
programs, whose partial sums are added in a fixed order, so no sum depends on timing. Launch sizes are chosen in
`pd_cluster.model.kernels.cuda.linear.lora_tables`.

A row of the table is [address of A, number of rows of A, then for each module of the layer: first row of A, rank,
address of B].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_places"], do_not_specialize_on_alignment=["rows", "blocks"])
def lora_shrink(
    x,  # [num_rows, NUM_INPUTS]
    low,  # [SPLITS, num_places, LOW_WIDTH] float32
    table,  # [num_adapters, TABLE_WIDTH] int64
    rows,  # [num_places] int32: rows of x, grouped by adapter
    blocks,  # [num_blocks, 3] int32: adapter, first index in `rows`, number of rows; blocks of 0 rows are skipped
    x_stride,
    num_places,
    NUM_INPUTS: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (num_blocks, SPLITS, tiles of BLOCK_R rows of A)."""
    dtype: tl.constexpr = x.dtype.element_ty
    block, split = tl.program_id(0), tl.program_id(1)
    count = tl.load(blocks + 3 * block + 2)
    own = table + tl.load(blocks + 3 * block).to(tl.int64) * TABLE_WIDTH
    rank = tl.program_id(2) * BLOCK_R
    if count > 0:  # noqa: SIM102
        if rank < tl.load(own + 1):
            m = tl.arange(0, BLOCK_M)
            r = rank + tl.arange(0, BLOCK_R)
            place = tl.load(blocks + 3 * block + 1) + m
            row = tl.load(rows + place, mask=m < count, other=0).to(tl.int64)
            a = tl.multiple_of(tl.load(own).to(tl.pointer_type(dtype)), 16)
            num_tiles: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
            per_split: tl.constexpr = (num_tiles + SPLITS - 1) // SPLITS
            total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for tile in range(split * per_split, tl.minimum((split + 1) * per_split, num_tiles)):
                k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
                is_there = (m < count)[:, None] & (k < NUM_INPUTS)[None, :]
                left = tl.load(x + row[:, None] * x_stride + k[None, :], mask=is_there, other=0.0)
                right = tl.load(a + r[None, :] * NUM_INPUTS + k[:, None], mask=(k < NUM_INPUTS)[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            target = low + (split * num_places + place).to(tl.int64)[:, None] * LOW_WIDTH + r[None, :]
            tl.store(target, total, mask=(m < count)[:, None])


@triton.jit(do_not_specialize=["num_places"], do_not_specialize_on_alignment=["rows", "blocks"])
def lora_expand(
    y,  # [num_rows, num_outputs]: updated in place
    low,
    table,
    rows,
    blocks,
    tiles,  # [num_tiles, 3] int32: module, its first output in the layer, the tile's first output in the module
    ends,  # [num_tiles] int32: the module's number of outputs
    y_stride,
    num_places,
    LOW_WIDTH: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: (num_blocks, num_tiles). Sums are float32; the base output plus the adapter's is rounded once."""
    dtype: tl.constexpr = y.dtype.element_ty
    block, tile = tl.program_id(0), tl.program_id(1)
    count = tl.load(blocks + 3 * block + 2)
    module = tl.load(tiles + 3 * tile)
    own = table + tl.load(blocks + 3 * block).to(tl.int64) * TABLE_WIDTH + 2 + 3 * module
    rank = tl.load(own + 1).to(tl.int32)
    if count > 0:  # noqa: SIM102
        if rank > 0:
            m = tl.arange(0, BLOCK_M)
            place = tl.load(blocks + 3 * block + 1) + m
            row = tl.load(rows + place, mask=m < count, other=0).to(tl.int64)
            n = tl.load(tiles + 3 * tile + 2) + tl.arange(0, BLOCK_N)
            is_output = n < tl.load(ends + tile)
            b = tl.multiple_of(tl.load(own + 2).to(tl.pointer_type(dtype)), 16)
            first = tl.load(own).to(tl.int32)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for at in range(0, rank, BLOCK_R):
                r = at + tl.arange(0, BLOCK_R)
                left = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    source = low + (split * num_places + place).to(tl.int64)[:, None] * LOW_WIDTH + first + r[None, :]
                    left += tl.load(source, mask=(m < count)[:, None], other=0.0)
                right = tl.load(b + n.to(tl.int64)[None, :] * rank + r[:, None], mask=is_output[None, :], other=0.0)
                total = tl.dot(left.to(dtype), right, total, input_precision="ieee")
            column = tl.load(tiles + 3 * tile + 1) + n
            target = y + row[:, None] * y_stride + column[None, :]
            is_there = (m < count)[:, None] & is_output[None, :]
            sum = tl.load(target, mask=is_there, other=0.0).to(tl.float32) + total
            tl.store(target, sum.to(dtype), mask=is_there)
