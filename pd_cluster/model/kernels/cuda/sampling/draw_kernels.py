"""Triton kernels that draw tokens with top_k and top_p, without sorting. See triton_draw.py.

    weigh_bins      counts the tokens and adds up the masses of each part of a row, in bins of a few octaves below the
                    row's best token
    gather_likely   copies the tokens of the bins that can contain the last kept token, in vocabulary order
    choose_among    finds the lowest kept logit among these tokens, by bisection, and then draws the token

Masses are those of `model/kernels/fixed_point`, so their sums are exact and do not depend on how a row is divided.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels import fixed_point

LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
LOG2_E = tl.constexpr(fixed_point.LOG2_E)
LEAST_EXPONENT = tl.constexpr(fixed_point.LEAST_EXPONENT)
ROUNDER = tl.constexpr(fixed_point.ROUNDER)
UNIT = tl.constexpr(float(1 << fixed_point.MASS_BITS))
TAYLOR = tuple(tl.constexpr(coefficient) for coefficient in fixed_point.TAYLOR)
T1, T2, T3, T4, T5, T6, T7, T8, T9, T10 = TAYLOR
OCTAVES = tl.constexpr(3.0)  # the width of a bin
NO_KEY = tl.constexpr(2147483647)


@triton.jit
def _value(pointer, inside):
    """Returns logits as float32; NaN becomes -inf and +inf the largest float32, as in `row_passes.mended`."""
    value = tl.load(pointer, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(value != value, float("-inf"), tl.where(value > LARGEST, LARGEST, value))


@triton.jit
def _exponent(value, best, inverse_temperature):
    exponent = (value.to(tl.float64) - best) * (inverse_temperature * LOG2_E)
    return tl.where(exponent < LEAST_EXPONENT, LEAST_EXPONENT, exponent)


@triton.jit
def _mass(exponent):
    """Returns `fixed_point.fixed_masses` for exponents, int64. Multiplications and additions must not be fused."""
    whole = (exponent + ROUNDER) - ROUNDER
    rest = exponent - whole
    power = (rest * T10 + T9) * rest
    power = (power + T8) * rest
    power = (power + T7) * rest
    power = (power + T6) * rest
    power = (power + T5) * rest
    power = (power + T4) * rest
    power = (power + T3) * rest
    power = (power + T2) * rest
    power = (power + T1) * rest + 1.0
    return (power * UNIT).to(tl.int64) >> (-whole).to(tl.int64)


@triton.jit
def _bin(exponent, BINS: tl.constexpr):
    bin = (exponent / -OCTAVES).to(tl.int32)
    return tl.where(bin < BINS, bin, BINS - 1)


@triton.jit
def _key(value):
    """Returns integers in the same order as the logits; equal logits give equal integers."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _share(fraction, total):
    return (fraction * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _outline(nums, masses, num_parts, top_k, PARTS: tl.constexpr, BINS: tl.constexpr):
    """Returns a row's token counts by part and bin, masses by bin, how many tokens top_k keeps, and their mass.

    The mass is -1 if top_k keeps fewer tokens than min_p.
    """
    part, bin = tl.arange(0, PARTS), tl.arange(0, BINS)
    at, inside = part[:, None] * BINS + bin[None, :], (part < num_parts)[:, None]
    counts = tl.load(nums + at, mask=inside, other=0)
    by_bin = tl.sum(tl.load(masses + at, mask=inside, other=0), axis=0)
    num_tokens = tl.sum(tl.sum(counts, axis=0), axis=0)
    limit = tl.where(top_k < num_tokens, top_k, num_tokens)
    return counts, by_bin, limit, tl.where(limit < num_tokens, -1, tl.sum(by_bin, axis=0))


@triton.jit
def weigh_bins(
    logits,  # [all rows, vocab_size]
    rows,  # [num_rows] int64
    best,  # [all rows] float32
    inverse_temperatures,  # [num_rows] float64, like log_min_p
    log_min_p,
    nums,  # [num_rows, num_parts, BINS] int32, out
    masses,  # the same, int64
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Each program counts and weighs PART tokens of one row."""
    row = tl.load(rows + tl.program_id(0))
    top = tl.load(best + row).to(tl.float64)
    inverse_temperature = tl.load(inverse_temperatures + tl.program_id(0))
    floor = top + tl.load(log_min_p + tl.program_id(0)) / inverse_temperature
    bins = tl.arange(0, BINS)
    num = tl.zeros((BINS, BLOCK), dtype=tl.int32)
    mass = tl.zeros((BINS, BLOCK), dtype=tl.int64)
    for start in range(0, PART, BLOCK):
        at = tl.program_id(1) * PART + start + tl.arange(0, BLOCK)
        value = _value(logits + row * row_stride + at, at < VOCAB_SIZE)
        exponent = _exponent(value, top, inverse_temperature)
        own = tl.where((at < VOCAB_SIZE) & (value.to(tl.float64) >= floor), _bin(exponent, BINS), BINS)
        is_own = own[None, :] == bins[:, None]
        num += is_own.to(tl.int32)
        mass += tl.where(is_own, _mass(exponent)[None, :], 0)
    out = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * BINS + bins
    tl.store(nums + out, tl.sum(num, axis=1))
    tl.store(masses + out, tl.sum(mass, axis=1))


@triton.jit
def gather_likely(
    logits,
    rows,
    best,
    inverse_temperatures,
    log_min_p,
    top_ks,  # [num_rows] int64
    top_ps,  # [num_rows] float64
    nums,
    masses,
    values,  # [num_rows, vocab_size] float32, out
    token_ids,  # the same, int32
    nums_likely,  # [num_rows] int32, out
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Each program copies the likely tokens from PART tokens of one row."""
    own_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + own_row)
    top = tl.load(best + row).to(tl.float64)
    inverse_temperature = tl.load(inverse_temperatures + own_row)
    floor = top + tl.load(log_min_p + own_row) / inverse_temperature
    top_p, num_parts = tl.load(top_ps + own_row), tl.num_programs(1)
    first = own_row * num_parts * BINS
    counts, by_bin, limit, total = _outline(
        nums + first, masses + first, num_parts, tl.load(top_ks + own_row), PARTS, BINS
    )
    last = tl.sum((tl.cumsum(tl.sum(counts, axis=0), axis=0) < limit).to(tl.int32), axis=0)
    if (total > 0) & (top_p < 1.0):
        goal = _share(top_p, total)
        by_mass = tl.sum((tl.cumsum(by_bin, axis=0) < goal).to(tl.int32), axis=0)
        last = tl.where(by_mass < last, by_mass, last)
    part, bin = tl.arange(0, PARTS), tl.arange(0, BINS)
    likely = tl.where(bin[None, :] <= last, counts, 0)
    before = tl.sum(tl.sum(tl.where((part < tl.program_id(1))[:, None], likely, 0), axis=0), axis=0)
    tl.store(nums_likely + own_row, tl.where(total == 0, 0, tl.sum(tl.sum(likely, axis=0), axis=0)))
    num_own = tl.sum(tl.sum(tl.where((part == tl.program_id(1))[:, None], likely, 0), axis=0), axis=0)
    if (num_own > 0) & (total != 0):
        for start in range(0, PART, BLOCK):
            at = tl.program_id(1) * PART + start + tl.arange(0, BLOCK)
            value = _value(logits + row * row_stride + at, at < VOCAB_SIZE)
            own = _bin(_exponent(value, top, inverse_temperature), BINS)
            is_likely = (at < VOCAB_SIZE) & (value.to(tl.float64) >= floor) & (own <= last)
            place = before + tl.cumsum(is_likely.to(tl.int32), axis=0) - 1
            tl.store(values + own_row * VOCAB_SIZE + place, value, mask=is_likely)
            tl.store(token_ids + own_row * VOCAB_SIZE + place, at, mask=is_likely)
            before += tl.sum(is_likely.to(tl.int32), axis=0)


@triton.jit
def _sums_above(values, num_values, key, top, inverse_temperature, BLOCK: tl.constexpr):
    """Returns the number and the mass of the tokens above a key, and the mass of a single token with that key."""
    num = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.int64)
    each = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, num_values, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < num_values, other=float("-inf"))
        own = _mass(_exponent(value, top, inverse_temperature))
        is_above = (at < num_values) & (_key(value) > key)
        num += is_above.to(tl.int32)
        mass += tl.where(is_above, own, 0)
        each = tl.where((at < num_values) & (_key(value) == key), own, each)
    return tl.sum(num, axis=0), tl.sum(mass, axis=0), tl.max(each, axis=0)


@triton.jit
def _worst_key(
    values, num_values, goal, is_mass, top, inverse_temperature, BLOCK: tl.constexpr, SECTIONS: tl.constexpr
):
    """Returns the largest key such that at least `goal` tokens have this key or a larger one.

    If `is_mass`, `goal` is the least mass of those tokens, not their number.
    """
    least = tl.full((BLOCK,), NO_KEY, dtype=tl.int32)
    for start in range(0, num_values, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _key(tl.load(values + at, mask=at < num_values, other=float("-inf")))
        least = tl.where((at < num_values) & (key < least), key, least)
    low = tl.min(least, axis=0).to(tl.int64)
    high = _key(top.to(tl.float32)).to(tl.int64)
    section = tl.arange(0, SECTIONS) + 1
    while low < high:
        pivot = low + ((high - low) * section + SECTIONS - 1) // SECTIONS
        reached = tl.zeros((SECTIONS, BLOCK), dtype=tl.int64)
        for start in range(0, num_values, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < num_values, other=float("-inf"))
            own = tl.where(is_mass, _mass(_exponent(value, top, inverse_temperature)), 1)
            is_in = (at < num_values)[None, :] & (_key(value).to(tl.int64)[None, :] >= pivot[:, None])
            reached += tl.where(is_in, own[None, :], 0)
        num = tl.sum((tl.sum(reached, axis=1) >= goal).to(tl.int32), axis=0)
        next_low = low + ((high - low) * num + SECTIONS - 1) // SECTIONS
        next_high = low + ((high - low) * (num + 1) + SECTIONS - 1) // SECTIONS - 1
        high = tl.where(num == SECTIONS, high, next_high)
        low = next_low
    return low.to(tl.int32)


@triton.jit
def _cut(values, num_values, goal, is_mass, top, inverse_temperature, BLOCK: tl.constexpr, SECTIONS: tl.constexpr):
    """Returns the lowest kept key, the number of tokens with larger keys, how many tokens with this key are kept, and
    the kept mass.
    """
    key = _worst_key(values, num_values, goal, is_mass, top, inverse_temperature, BLOCK, SECTIONS)
    num_above, mass_above, each = _sums_above(values, num_values, key, top, inverse_temperature, BLOCK)
    by_mass = goal - mass_above + each - 1
    num_equal = goal - num_above
    if is_mass:  # if a token's mass is 0, keeping it adds nothing
        num_equal = by_mass // tl.where(each > 0, each, 1)
    return key, num_above, num_equal.to(tl.int32), mass_above + num_equal * each


@triton.jit
def _at_mass(values, num_values, key, num_equal, target, top, inverse_temperature, BLOCK: tl.constexpr):
    """Returns the index of the kept token at which the sum of the masses, in vocabulary order, exceeds `target`."""
    start = num_values - num_values
    num_seen, place = start, start
    before = target - target
    is_found = start
    while (start < num_values) & (is_found == 0):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < num_values, other=float("-inf"))
        is_equal = (at < num_values) & (_key(value) == key)
        in_turn = num_seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
        is_kept = (is_equal & (in_turn <= num_equal)) | ((at < num_values) & (_key(value) > key))
        own = tl.where(is_kept, _mass(_exponent(value, top, inverse_temperature)), 0)
        reached = before + tl.cumsum(own, axis=0)
        num_before = tl.sum((reached <= target).to(tl.int32), axis=0)
        place = start + num_before
        is_found = (num_before < BLOCK).to(tl.int32)
        before += tl.sum(own, axis=0)
        num_seen += tl.sum(is_equal.to(tl.int32), axis=0)
        start += BLOCK
    return place


@triton.jit
def choose_among(
    rows,
    best,
    best_ids,  # [all rows] int64
    inverse_temperatures,
    top_ks,
    top_ps,
    uniforms,  # [num_rows] float64
    nums,
    masses,
    values,
    token_ids,
    nums_likely,
    chosen,  # [num_rows] int64, out
    worst,  # [num_rows] float32, out: the lowest kept logit
    nums_kept,  # [num_rows] int32, out
    num_parts,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    SECTIONS: tl.constexpr,
):
    """Each program draws the token of one row. A row without candidates gets its best token."""
    own_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + own_row)
    top = tl.load(best + row).to(tl.float64)
    inverse_temperature = tl.load(inverse_temperatures + own_row)
    top_p = tl.load(top_ps + own_row)
    first = own_row * num_parts * BINS
    _counts, _by_bin, limit, total = _outline(
        nums + first, masses + first, num_parts, tl.load(top_ks + own_row), PARTS, BINS
    )
    num_values = tl.load(nums_likely + own_row)
    values += own_row * VOCAB_SIZE
    if num_values == 0:
        tl.store(chosen + own_row, tl.load(best_ids + row))
        tl.store(worst + own_row, float("-inf"))
        tl.store(nums_kept + own_row, 0)
    else:
        key, num_above, num_equal = NO_KEY - num_values, num_values, num_values
        if (total < 0) | (top_p >= 1.0):
            key, num_above, num_equal, total = _cut(
                values, num_values, limit, False, top, inverse_temperature, BLOCK, SECTIONS
            )
        if top_p < 1.0:
            goal = _share(top_p, total)
            goal = tl.where(goal > 1, goal, 1)
            key, num_above, num_equal, total = _cut(
                values, num_values, goal, True, top, inverse_temperature, BLOCK, SECTIONS
            )
        target = _share(tl.load(uniforms + own_row), total)
        target = tl.where(target < total, target, total - 1)
        place = _at_mass(values, num_values, key, num_equal, target, top, inverse_temperature, BLOCK)
        drawn = tl.load(token_ids + own_row * VOCAB_SIZE + place).to(tl.int64)
        tl.store(chosen + own_row, tl.where(total > 0, drawn, tl.load(best_ids + row)))
        tl.store(worst + own_row, (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
        tl.store(nums_kept + own_row, num_above + num_equal)
