"""Triton kernels of linear layers with quantized weights: codes are decoded in registers, just before a product.

A stored row of a weight consists of bytes, or of 32-bit words with eight four-bit codes each. In a tile of 128 inputs,
bits 4 s to 4 s + 3 of word j hold the code of input 16 s + j. So all words, shifted right by 4 s, hold the codes of 16
adjacent inputs. Codes are decoded in float32 and rounded once, to the activations' dtype, like `CodedWeight.matrix`.
The tables of tiles are in `pd_cluster.model.kernels.cuda.linear.quantized_linear`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.attention.quantized_kv import nearest
from pd_cluster.model.kernels.cuda.linear.linear_kernels import tile_of

INT4 = tl.constexpr(0)  # unsigned, minus a zero point
E2M1 = tl.constexpr(1)  # four-bit floats
INT8 = tl.constexpr(2)
E4M3 = tl.constexpr(3)
ROUNDED = tl.constexpr(4)  # int8 with int8 activations: sums are exact integers
PLAIN = tl.constexpr(5)  # floats, for kernels that support both


@triton.jit
def numbers_of_words(words, slot: tl.constexpr, offset, KIND: tl.constexpr):
    """Returns the code in slot `slot` of each word as float32; `offset` is 2^23 plus the zero point."""
    code = (words >> (4 * slot)) & 15
    if KIND == E2M1:
        return ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    # The bits of the float 2^23 + n are the bits of the float 2^23, plus n.
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - offset


@triton.jit
def numbers_of_bytes(stored, zero, KIND: tl.constexpr):
    """Returns codes as float32, with the zero point subtracted."""
    if KIND == E4M3:  # from the bits, because some GPUs cannot convert E4M3
        bits = stored.to(tl.int32)
        return ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return stored.to(tl.float32) - zero


@triton.jit
def coded_sum(
    x,  # [BLOCK_M, 1] pointers to rows of NUM_INPUTS activations
    is_row,  # [BLOCK_M, 1]: false for rows that are not read but count as zeros
    codes,  # rows of WIDTH words or bytes
    scales,  # rows of NUM_GROUPS float32; not read for ROUNDED
    zeros,  # rows of NUM_GROUPS; read if HAS_ZEROS
    row,  # [1, BLOCK_N] int64: the weight's rows
    first,  # tile of inputs
    stop,
    NUM_INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,  # the zero point without HAS_ZEROS, plus 2^23 if codes are packed in words
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns x @ weight.T for tiles [first, stop) of BLOCK_K inputs, as [BLOCK_M, BLOCK_N] float32 or int32."""
    dtype: tl.constexpr = x.dtype.element_ty
    scale_rows = scales + row * NUM_GROUPS
    zero_rows = zeros + row * NUM_GROUPS
    if KIND == ROUNDED:
        at = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for tile in range(first, stop):
            k = tile * BLOCK_K + at
            left = tl.load(x + k[None, :], mask=is_row & (k < NUM_INPUTS)[None, :], other=0)
            right = tl.load(codes + row * WIDTH + k[:, None])
            total = tl.dot(left, right, total, out_dtype=tl.int32)
    elif KIND <= E2M1:
        inner: tl.constexpr = 16  # words of a tile
        at = tl.arange(0, inner)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for tile in range(first, stop):
            words = tl.load(codes + row * WIDTH + tile * inner + at[:, None])  # [inner, BLOCK_N]
            scale = tl.load(scale_rows + tl.minimum(tile * 128 // GROUP_SIZE, NUM_GROUPS - 1))
            offset = OFFSET
            if HAS_ZEROS:
                offset = 8388608.0 + tl.load(zero_rows + tl.minimum(tile * 128 // GROUP_SIZE, NUM_GROUPS - 1))
            for slot in tl.static_range(8):
                k = tile * 128 + slot * inner + at
                if GROUP_SIZE % 128 != 0 and NUM_GROUPS > 1:
                    group = tl.minimum((tile * 128 + slot * inner) // GROUP_SIZE, NUM_GROUPS - 1)
                    scale = tl.load(scale_rows + group)
                    if HAS_ZEROS:
                        offset = 8388608.0 + tl.load(zero_rows + group)
                if NUM_INPUTS % 128 == 0:
                    left = tl.load(x + k[None, :], mask=is_row, other=0.0)
                else:
                    left = tl.load(x + k[None, :], mask=is_row & (k < NUM_INPUTS)[None, :], other=0.0)
                right = (numbers_of_words(words, slot, offset, KIND) * scale).to(dtype)
                total = tl.dot(left, right, total, input_precision="ieee")
    else:
        at = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for tile in range(first, stop):
            k = tile * BLOCK_K + at
            group = tl.minimum(tile * BLOCK_K // GROUP_SIZE, NUM_GROUPS - 1)
            scale = tl.load(scale_rows + group)
            zero = OFFSET
            if HAS_ZEROS:
                zero = tl.load(zero_rows + group)
            if NUM_INPUTS % BLOCK_K == 0:
                left = tl.load(x + k[None, :], mask=is_row, other=0.0)
            else:
                left = tl.load(x + k[None, :], mask=is_row & (k < NUM_INPUTS)[None, :], other=0.0)
            right = (numbers_of_bytes(tl.load(codes + row * WIDTH + k[:, None]), zero, KIND) * scale).to(dtype)
            total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def scaled_sum(
    total,  # [BLOCK_M, BLOCK_N] int32
    x_scale,  # [BLOCK_M, 1] float32, if each row has its own
    scales,  # [num_outputs] float32
    shifts,  # [num_outputs] int32: the activations' zero point times the sums of codes, if IS_STATIC
    row,  # [1, BLOCK_N]
    IS_STATIC: tl.constexpr,
):
    """Returns the product as float32; the order of operations is that in `Int8Linear`."""
    if IS_STATIC:
        return (total - tl.load(shifts + row)).to(tl.float32) * tl.load(scales + row)
    return total.to(tl.float32) * x_scale * tl.load(scales + row)


@triton.jit(do_not_specialize=["num_rows", "num_row_tiles"])
def coded_linear_product(
    x,  # [num_rows, NUM_INPUTS], contiguous
    x_scales,  # [num_rows] float32, for ROUNDED
    codes,
    scales,
    zeros,  # or shifts, for ROUNDED
    bias,  # [NUM_OUTPUTS], read if HAS_BIAS
    out,  # [num_rows, NUM_OUTPUTS], contiguous
    partial,  # [tiles, SPLITS, BLOCK_M, BLOCK_N], read if SPLITS > 1
    arrived,  # [tiles] int32: all 0 before and after a launch
    num_rows,
    num_row_tiles,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: (tiles, SPLITS). A program computes BLOCK_M rows by BLOCK_N columns over its split of the inputs.

    The last program of a tile adds the tile's splits from first to last, so the bits do not depend on which one is
    last.
    """
    num_tiles: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    per_split: tl.constexpr = (num_tiles + SPLITS - 1) // SPLITS
    row_tile, column_tile = tile_of(num_row_tiles, (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N, GROUP)
    split = tl.program_id(1)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(column, NUM_OUTPUTS - 1).to(tl.int64)[None, :]
    total = coded_sum(
        x + row.to(tl.int64)[:, None] * NUM_INPUTS, (row < num_rows)[:, None], codes, scales, zeros, near,
        split * per_split, tl.minimum((split + 1) * per_split, num_tiles),
        NUM_INPUTS, WIDTH, GROUP_SIZE, NUM_GROUPS, KIND, HAS_ZEROS, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    is_last = True
    if SPLITS > 1:
        at = (tl.arange(0, BLOCK_M) * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        own = partial + tl.program_id(0).to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + at
        tl.store(own + split * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()  # all threads must have stored their values before the arrival is counted
        is_last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.load(own, cache_modifier=".cg")
            for other in range(1, SPLITS):
                total += tl.load(own + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
    if is_last:
        if KIND == ROUNDED:
            x_scale = 0.0
            if not HAS_ZEROS:
                x_scale = tl.load(x_scales + row, mask=row < num_rows, other=0.0)[:, None]
            result = scaled_sum(total, x_scale, scales, zeros, near, HAS_ZEROS)
        else:
            result = total
        if HAS_BIAS:
            result += tl.load(bias + near).to(tl.float32)
        target = out + row.to(tl.int64)[:, None] * NUM_OUTPUTS + column[None, :]
        stored = (row < num_rows)[:, None] & (column < NUM_OUTPUTS)[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=stored)


@triton.jit
def decode_rows(
    codes,
    scales,
    zeros,
    out,  # [NUM_OUTPUTS, NUM_INPUTS]
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: (tiles of ROWS outputs, tiles of 128 inputs). Writes the decoded weight."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    is_row = row < NUM_OUTPUTS
    near = tl.minimum(row, NUM_OUTPUTS - 1)
    tile = tl.program_id(1)
    if KIND <= E2M1:
        inner: tl.constexpr = 16  # words of a tile
        at = tl.arange(0, inner)[None, :]
        words = tl.load(codes + near * WIDTH + tile * inner + at)
        for slot in tl.static_range(8):
            k = tile * 128 + slot * inner + at
            group = near * NUM_GROUPS + tl.minimum((tile * 128 + slot * inner) // GROUP_SIZE, NUM_GROUPS - 1)
            offset = OFFSET
            if HAS_ZEROS:
                offset = 8388608.0 + tl.load(zeros + group)
            number = numbers_of_words(words, slot, offset, KIND) * tl.load(scales + group)
            tl.store(out + row * NUM_INPUTS + k, number.to(out.dtype.element_ty), mask=is_row & (k < NUM_INPUTS))
    else:
        k = tile * 128 + tl.arange(0, 128)[None, :]
        group = near * NUM_GROUPS + tl.minimum(k // GROUP_SIZE, NUM_GROUPS - 1)
        zero = OFFSET
        if HAS_ZEROS:
            zero = tl.load(zeros + group)
        number = numbers_of_bytes(tl.load(codes + near * WIDTH + k), zero, KIND) * tl.load(scales + group)
        tl.store(out + row * NUM_INPUTS + k, number.to(out.dtype.element_ty), mask=is_row & (k < NUM_INPUTS))


@triton.jit
def round_rows(
    x,  # [num_rows, NUM_INPUTS]
    codes,  # [num_rows, NUM_INPUTS] int8, contiguous
    x_scales,  # [num_rows] float32, unless IS_STATIC
    row_stride,
    scale,
    zero,
    NUM_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    """Each program rounds one row, like `quantize_rows`, or with the file's scale and zero point (`Int8Linear`)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if IS_STATIC:
        for first in range(0, NUM_INPUTS, BLOCK):
            k = first + at
            value = tl.load(x + row * row_stride + k, mask=k < NUM_INPUTS, other=0.0).to(tl.float32)
            value = tl.minimum(tl.maximum(tl.div_rn(value, scale), -1048576.0), 1048576.0)
            code = tl.minimum(tl.maximum(nearest(value) + zero, -128.0), 127.0)
            tl.store(codes + row * NUM_INPUTS + k, code.to(tl.int8), mask=k < NUM_INPUTS)
    else:
        most = tl.zeros((BLOCK,), dtype=tl.float32)
        is_regular = tl.full((BLOCK,), 1, dtype=tl.int32)
        for first in range(0, NUM_INPUTS, BLOCK):
            k = first + at
            value = tl.abs(tl.load(x + row * row_stride + k, mask=k < NUM_INPUTS, other=0.0).to(tl.float32))
            is_regular &= (value < float("inf")).to(tl.int32)  # false also for NaN
            most = tl.maximum(most, value)
        largest = tl.max(most, 0)
        is_finite = tl.min(is_regular, 0) == 1
        is_there = is_finite & (largest >= 7.888609052210118e-31)  # 2^-100
        inverse = tl.div_rn(127.0, tl.where(is_there, largest, 1.0))
        tl.store(x_scales + row, tl.where(is_finite, tl.div_rn(largest, 127.0), float("nan")))
        for first in range(0, NUM_INPUTS, BLOCK):
            k = first + at
            value = tl.load(x + row * row_stride + k, mask=k < NUM_INPUTS, other=0.0).to(tl.float32)
            code = tl.where(is_there, nearest(tl.where(is_there, value, 0.0) * inverse), 0.0)
            tl.store(codes + row * NUM_INPUTS + k, code.to(tl.int8), mask=k < NUM_INPUTS)
