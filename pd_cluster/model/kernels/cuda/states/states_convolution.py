"""Triton kernels of a short causal convolution of each channel, which starts from the last inputs stored in a state.

A sum starts with its bias and then adds the oldest input first, regardless of where steps begin (native/convolution.h).
The channels form up to three parts of heads, each with its own plane; a tile of channels belongs to one part.
`segments` and `starts`: see states_kernels.py. triton_states.py chooses launch sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.states.states_kernels import logistic


@triton.jit
def part_of(tile, first, second, third, TILES_1: tl.constexpr, TILES_2: tl.constexpr):
    """Returns the value of the part that contains a tile of channels; the second part begins at TILES_1, and so on."""
    found = first
    if tile >= TILES_1:
        found = second
    if tile >= TILES_2:
        found = third
    return found


@triton.jit
def channels_of(
    tile,
    HEADS_1: tl.constexpr,
    HEADS_2: tl.constexpr,
    HEADS_3: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES_2: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns a tile's channels, a mask of valid ones, the place of their oldest kept inputs in a block, and the stride
    to the next inputs.
    """
    in_2 = (tile >= TILES_1).to(tl.int32)
    in_3 = (tile >= TILES_2).to(tl.int32)
    width = WIDTH_1 + in_2 * (WIDTH_2 - WIDTH_1) + in_3 * (WIDTH_3 - WIDTH_2)
    heads = HEADS_1 + in_2 * (HEADS_2 - HEADS_1) + in_3 * (HEADS_3 - HEADS_2)
    first = in_2 * (HEADS_1 * WIDTH_1) + in_3 * (HEADS_2 * WIDTH_2)
    own = tile - in_2 * TILES_1 - in_3 * (TILES_2 - TILES_1)
    at = own * BLOCK + tl.arange(0, BLOCK)
    head = at // width
    return first + at, at < heads * width, head * (NUM_KEPT * width) + at - head * width, width


@triton.jit(do_not_specialize=["num_rows", "x_stride"], do_not_specialize_on_alignment=["row_places"])
def convolve_rows(
    x,  # [num_rows, NUM_CHANNELS], strided
    out,  # [num_rows, NUM_CHANNELS]
    weight,  # [NUM_KEPT + 1, NUM_CHANNELS] float32; the first row multiplies the oldest input
    bias,  # [NUM_CHANNELS] float32
    kept_1,  # planes of the parts' last inputs; with fewer than three parts, the last plane is repeated
    kept_2,
    kept_3,
    row_places,  # [num_rows, 2] int32: the first row of the row's sequence, and the sequence's block
    num_rows,
    x_stride,
    stride_1,
    stride_2,
    stride_3,
    NUM_CHANNELS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    HEADS_1: tl.constexpr,
    HEADS_2: tl.constexpr,
    HEADS_3: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES_2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (tiles of ROWS rows, tiles of channels of all parts). A sum starts with its bias and the oldest input.

    This kernel only reads kept inputs; `keep_inputs`, which runs after it, writes them.
    """
    tile = tl.program_id(1)
    channel, is_channel, place, width = channels_of(
        tile, HEADS_1, HEADS_2, HEADS_3, WIDTH_1, WIDTH_2, WIDTH_3, TILES_1, TILES_2, NUM_KEPT, BLOCK
    )
    kept = part_of(tile, kept_1, kept_2, kept_3, TILES_1, TILES_2)
    stride = part_of(tile, stride_1.to(tl.int64), stride_2.to(tl.int64), stride_3.to(tl.int64), TILES_1, TILES_2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    first = tl.load(row_places + 2 * row, mask=is_row, other=0)
    block = tl.load(row_places + 2 * row + 1, mask=is_row, other=0).to(tl.int64)
    is_there = is_row[:, None] & is_channel[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
    for j in tl.static_range(NUM_KEPT + 1):
        source = row - NUM_KEPT + j
        is_new = (source >= first)[:, None]
        new = x + source.to(tl.int64)[:, None] * x_stride + channel[None, :]
        old = kept + (block * stride)[:, None] + (row - first + j)[:, None] * width + place[None, :]
        value = tl.load(new, mask=is_there & is_new, other=0.0).to(tl.float32)
        if j < NUM_KEPT:
            value += tl.load(old, mask=is_there & ~is_new, other=0.0)
        total += tl.load(weight + j * NUM_CHANNELS + channel, mask=is_channel, other=0.0)[None, :] * value
    if HAS_SILU:
        total = total * logistic(total)
    target = out + row.to(tl.int64)[:, None] * NUM_CHANNELS + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def last_inputs(
    x, kept, first, stop, block, x_stride, stride, channel, is_channel, place, width,
    NUM_KEPT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Returns the NUM_KEPT inputs before row `stop` of a sequence that begins at row `first`, [KEPT, BLOCK]."""
    j = tl.arange(0, KEPT)
    source = stop - NUM_KEPT + j
    is_new = (source >= first)[:, None]
    is_there = (j < NUM_KEPT)[:, None] & is_channel[None, :]
    new = x + source.to(tl.int64)[:, None] * x_stride + channel[None, :]
    old = kept + block * stride + (stop - first + j)[:, None] * width + place[None, :]
    value = tl.load(new, mask=is_there & is_new, other=0.0).to(tl.float32)
    return value + tl.load(old, mask=is_there & ~is_new, other=0.0)


@triton.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["segments", "starts"])
def keep_inputs(
    x,
    kept_1,
    kept_2,
    kept_3,
    segments,
    starts,
    x_stride,
    stride_1,
    stride_2,
    stride_3,
    NUM_KEPT: tl.constexpr,
    HEADS_1: tl.constexpr,
    HEADS_2: tl.constexpr,
    HEADS_3: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES_2: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_sequences, tiles of channels of all parts). Stores the last inputs before the end of each segment.

    KEPT is NUM_KEPT rounded up. Checkpoints are written first, because they need the earlier inputs, which the
    last store overwrites in the block.
    """
    tile = tl.program_id(1)
    channel, is_channel, place, width = channels_of(
        tile, HEADS_1, HEADS_2, HEADS_3, WIDTH_1, WIDTH_2, WIDTH_3, TILES_1, TILES_2, NUM_KEPT, BLOCK
    )
    kept = part_of(tile, kept_1, kept_2, kept_3, TILES_1, TILES_2)
    stride = part_of(tile, stride_1.to(tl.int64), stride_2.to(tl.int64), stride_3.to(tl.int64), TILES_1, TILES_2)
    start, end = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    first = tl.load(segments + 4 * start)
    block = tl.load(segments + 4 * start + 2).to(tl.int64)
    own = tl.arange(0, KEPT)[:, None] * width + place[None, :]
    is_there = (tl.arange(0, KEPT) < NUM_KEPT)[:, None] & is_channel[None, :]
    for segment in range(start, end):
        copy = tl.load(segments + 4 * segment + 3).to(tl.int64)
        if copy >= 0:
            stop = tl.load(segments + 4 * segment + 1)
            value = last_inputs(
                x, kept, first, stop, block, x_stride, stride, channel, is_channel, place, width, NUM_KEPT, KEPT
            )
            tl.store(kept + copy * stride + own, value, mask=is_there)
    stop = tl.load(segments + 4 * end - 3)
    value = last_inputs(
        x, kept, first, stop, block, x_stride, stride, channel, is_channel, place, width, NUM_KEPT, KEPT
    )
    tl.debug_barrier()  # the next store overwrites values that other threads read
    tl.store(kept + block * stride + own, value, mask=is_there)
