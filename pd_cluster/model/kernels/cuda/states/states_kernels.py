"""Triton kernels of recurrent layers: the gated delta rule, Mamba-2, and the norm after them.

The tokens of a sequence update a state in registers one by one, all in float32, and no product uses tensor cores. So a
row's bits depend neither on where steps begin nor on other rows. The formulas are the same as in the C kernels
(native/gated_delta.h, mamba2.h). triton_states.py chooses launch sizes.

`segments` [num_segments, 4] int32 is the table of inputs/state_rows.py; `starts` [num_sequences + 1] int32 has the
first segment of each sequence. A block of a plane is [num_heads, …], contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logistic(x):
    """Returns 1 / (1 + exp(-x)); exponents are clamped so that exp does not overflow."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 87.0)))


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)) = max(x, 0) + log(1 + y), y = exp(-|x|); the logarithm is 2 artanh(y / (2 + y)).

    The series of artanh keeps the digits of a small y, which long sequences need; 1 + y would lose them.
    """
    y = tl.exp(-tl.abs(x))
    s = y / (y + 2.0)
    square = s * s
    series = 1.0 / 13 + square / 15
    series = 1.0 / 11 + square * series
    series = 1.0 / 9 + square * series
    series = 1.0 / 7 + square * series
    series = 1.0 / 5 + square * series
    series = 1.0 / 3 + square * series
    series = 1.0 + square * series
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def unit_vector(x):
    """Returns x divided by its length."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6))


@triton.jit(do_not_specialize=["decays_stride", "betas_stride"], do_not_specialize_on_alignment=["segments", "starts"])
def delta_rule(
    qkv,  # [num_rows, queries, keys and values of all heads] float32
    decays,  # [num_rows, NUM_HEADS], or [num_rows, NUM_HEADS * KEY_WIDTH], strided; before softplus and bias
    betas,  # [num_rows, NUM_HEADS], strided; before sigmoid
    decay_bias,  # like one row of decays, float32
    rates,  # [NUM_HEADS] float32
    out,  # [num_rows, NUM_HEADS * VALUE_WIDTH]
    state,  # [num_blocks][NUM_HEADS][KEY_WIDTH][VALUE_WIDTH] float32
    segments,
    starts,
    decays_stride,
    betas_stride,
    state_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    SCALE: tl.constexpr,  # factor of queries
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (num_sequences, NUM_HEADS, tiles of COLUMNS columns of a state). KEYS is KEY_WIDTH rounded up."""
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_WIDTH + NUM_HEADS * VALUE_WIDTH
    head = tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    i = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = i < KEY_WIDTH, column < VALUE_WIDTH
    is_there = is_key[:, None] & is_column[None, :]
    own = state + head.to(tl.int64) * (KEY_WIDTH * VALUE_WIDTH) + i[:, None] * VALUE_WIDTH + column[None, :]
    rate = tl.load(rates + head)
    if HAS_CHANNEL_DECAYS:
        bias = tl.load(decay_bias + head * KEY_WIDTH + i, mask=is_key, other=0.0)
    else:
        bias = tl.load(decay_bias + head)
    start, end = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    block = tl.load(segments + 4 * start + 2).to(tl.int64)
    s = tl.load(own + block * state_stride, mask=is_there, other=0.0)
    for segment in range(start, end):
        first = tl.load(segments + 4 * segment).to(tl.int64)
        for at in range(first, tl.load(segments + 4 * segment + 1).to(tl.int64)):
            x = qkv + at * NUM_CHANNELS
            q = tl.load(x + key_head * KEY_WIDTH + i, mask=is_key, other=0.0)
            k = tl.load(x + (NUM_KEY_HEADS + key_head) * KEY_WIDTH + i, mask=is_key, other=0.0)
            v = tl.load(x + 2 * NUM_KEY_HEADS * KEY_WIDTH + head * VALUE_WIDTH + column, mask=is_column, other=0.0)
            q, k = unit_vector(q) * SCALE, unit_vector(k)
            beta = logistic(tl.load(betas + at * betas_stride + head).to(tl.float32))
            if HAS_CHANNEL_DECAYS:
                raw = tl.load(decays + at * decays_stride + head * KEY_WIDTH + i, mask=is_key, other=0.0)
                s = s * tl.exp(-rate * softplus(raw.to(tl.float32) + bias))[:, None]
            else:
                raw = tl.load(decays + at * decays_stride + head).to(tl.float32)
                s = s * tl.exp(-rate * softplus(raw + bias))
            delta = (v - tl.sum(s * k[:, None], axis=0)) * beta
            s = s + k[:, None] * delta[None, :]
            found = tl.sum(s * q[:, None], axis=0)
            target = out + at * (NUM_HEADS * VALUE_WIDTH) + head * VALUE_WIDTH + column
            tl.store(target, found.to(out.dtype.element_ty), mask=is_column)
        copy = tl.load(segments + 4 * segment + 3).to(tl.int64)
        if copy >= 0:
            tl.store(own + copy * state_stride, s, mask=is_there)
    tl.store(own + block * state_stride, s, mask=is_there)


@triton.jit(do_not_specialize=["steps_stride"], do_not_specialize_on_alignment=["segments", "starts"])
def mamba_scan(
    xbc,  # [num_rows, x of all heads, B and C of all groups] float32
    steps,  # [num_rows, NUM_HEADS], strided; before softplus and bias
    step_bias,  # [NUM_HEADS] float32, like the next two
    rates,
    skips,
    out,  # [num_rows, NUM_HEADS * HEAD_WIDTH]
    state,  # [num_blocks][NUM_HEADS][HEAD_WIDTH][STATE_SIZE] float32
    segments,
    starts,
    steps_stride,
    state_stride,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    LEAST_STEP: tl.constexpr,
    MOST_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Grid: (num_sequences, NUM_HEADS, tiles of ROWS rows of a state). SIZE is STATE_SIZE rounded up."""
    INNER: tl.constexpr = NUM_HEADS * HEAD_WIDTH
    NUM_CHANNELS: tl.constexpr = INNER + 2 * NUM_GROUPS * STATE_SIZE
    head = tl.program_id(1)
    group = head // (NUM_HEADS // NUM_GROUPS)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, SIZE)
    is_row, is_column = r < HEAD_WIDTH, n < STATE_SIZE
    is_there = is_row[:, None] & is_column[None, :]
    own = state + head.to(tl.int64) * (HEAD_WIDTH * STATE_SIZE) + r[:, None] * STATE_SIZE + n[None, :]
    bias, rate, skip = tl.load(step_bias + head), tl.load(rates + head), tl.load(skips + head)
    start, end = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    block = tl.load(segments + 4 * start + 2).to(tl.int64)
    s = tl.load(own + block * state_stride, mask=is_there, other=0.0)
    for segment in range(start, end):
        first = tl.load(segments + 4 * segment).to(tl.int64)
        for at in range(first, tl.load(segments + 4 * segment + 1).to(tl.int64)):
            x = tl.load(xbc + at * NUM_CHANNELS + head * HEAD_WIDTH + r, mask=is_row, other=0.0)
            b = tl.load(xbc + at * NUM_CHANNELS + INNER + group * STATE_SIZE + n, mask=is_column, other=0.0)
            c = tl.load(
                xbc + at * NUM_CHANNELS + INNER + (NUM_GROUPS + group) * STATE_SIZE + n, mask=is_column, other=0.0
            )
            step = softplus(tl.load(steps + at * steps_stride + head).to(tl.float32) + bias)
            step = tl.minimum(tl.maximum(step, LEAST_STEP), MOST_STEP)
            s = s * tl.exp(-rate * step) + (step * x)[:, None] * b[None, :]
            found = tl.sum(s * c[None, :], axis=1) + skip * x
            target = out + at * INNER + head * HEAD_WIDTH + r
            tl.store(target, found.to(out.dtype.element_ty), mask=is_row)
        copy = tl.load(segments + 4 * segment + 3).to(tl.int64)
        if copy >= 0:
            tl.store(own + copy * state_stride, s, mask=is_there)
    tl.store(own + block * state_stride, s, mask=is_there)


@triton.jit(do_not_specialize=["gate_stride"])
def gated_norm(
    x,  # [num_rows, features] float32
    gate,  # like x, strided
    weight,  # [WIDTH] or [features] float32
    out,  # like x
    gate_stride,
    eps,
    NUM_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,  # otherwise there is no norm
    WEIGHT_STRIDE: tl.constexpr,  # between groups
    GATE: tl.constexpr,  # index in native.recurrence_values.GATES
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, NUM_GROUPS). Divides a group of features by its root mean square; applies the gate before or
    after.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_there = at < WIDTH
    own = row * (NUM_GROUPS * WIDTH) + group * WIDTH + at
    value = tl.load(x + own, mask=is_there, other=0.0)
    if GATE != 0:
        gates = tl.load(gate + row * gate_stride + group * WIDTH + at, mask=is_there, other=0.0).to(tl.float32)
        opened = logistic(gates)
        if GATE != 2:
            opened = gates * opened
    if GATE == 3:
        value = value * opened
    if HAS_WEIGHT:
        mean = tl.sum(value * value, axis=0) / WIDTH
        value = value * (1.0 / tl.sqrt(mean + eps))
        value = value * tl.load(weight + group * WEIGHT_STRIDE + at, mask=is_there, other=0.0)
    if GATE == 1 or GATE == 2:
        value = value * opened
    tl.store(out + own, value.to(out.dtype.element_ty), mask=is_there)
