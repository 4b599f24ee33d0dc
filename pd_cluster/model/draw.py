"""Draws a token of each row of logits: temperature, min_p, top_k, top_p, then inverse transform sampling.

What is kept is always a prefix of the tokens sorted by logit and, among equals, by id. It is found from sorted values
alone, and the draw sums in the vocabulary's order: then neither the order in which equal values are found, nor two
almost equally likely tokens that change places as rounding has it, changes what is drawn.
Knows nothing of requests, nor where random numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd_cluster.model.passes import Bools, Floats, Ints, copy_of_rows, leading, masses, rows_of
from pd_cluster.types import SamplingParams

FEW = 64  # tokens kept by all but a few rows; such rows are looked at together
MARGIN = 16  # candidates beyond, so that tokens equal to the last one kept are seldom cut off
BINS_A_UNIT = 100  # of the logit over the temperature
MAX_BELOW = 80.0  # those units; what is less likely shares a bin


@dataclass(frozen=True, slots=True)
class Knobs:
    """What shapes each row's distribution, every field [num_rows]. A row is one draw."""

    inverse_temperature: Floats
    top_k: Ints  # the vocabulary's size for no limit
    top_p: Floats
    log_min_p: Floats
    uniform: Floats  # in [0, 1)

    @classmethod
    def of(cls, params: Sequence[SamplingParams], uniform: Floats, vocab_size: int) -> Knobs:
        """Temperatures are kept within 1e-30 and 1e30, so that no product with them is NaN."""
        temperature = np.nan_to_num([p.temperature for p in params], nan=1.0).clip(1e-30, 1e30)
        min_p = np.nan_to_num([p.min_p for p in params]).clip(0.0, 1.0)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p)
        top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], dtype=np.int64)
        return cls(1.0 / temperature, top_k, np.array([p.top_p for p in params]), log_min_p, uniform)

    def rows(self, at: Ints | Bools) -> Knobs:
        return Knobs(self.inverse_temperature[at], self.top_k[at], self.top_p[at], self.log_min_p[at], self.uniform[at])

    def floor(self, best: Floats) -> Floats:
        """The least float32 logit that min_p leaves, [num_rows]; never above the best."""
        exact = best + self.log_min_p / self.inverse_temperature
        with np.errstate(over="ignore"):
            rounded = exact.astype(np.float32)
            return np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)


def draw(logits: Tensor, best: Floats, knobs: Knobs) -> Ints:
    """Token ids [num_rows] for logits [num_rows, vocab_size] float32 whose largest ones are `best`, all finite."""
    num_rows, vocab_size = logits.shape
    token_ids = np.zeros(num_rows, dtype=np.int64)
    total = np.zeros(num_rows)  # mass of all tokens that min_p leaves, where top_k does not limit them
    unlimited = knobs.top_k == vocab_size
    if unlimited.any():
        at = np.flatnonzero(unlimited)
        chosen = knobs.rows(at)
        token_ids[at], total[at] = _draw_above(rows_of(logits, at), best[at], chosen, chosen.floor(best[at]))
    pending = ~unlimited | (knobs.top_p < 1.0)
    at = np.flatnonzero(pending & (unlimited | (knobs.top_k <= FEW)))
    if len(at):
        token_ids[at], done = _draw_from_few(rows_of(logits, at), best[at], knobs.rows(at), total[at])
        pending[at[done]] = False
    if pending.any():
        at = np.flatnonzero(pending)
        token_ids[at] = _draw_from_many(copy_of_rows(logits, at), best[at], knobs.rows(at))
    return token_ids


def _draw_above(logits: Tensor, best: Floats, knobs: Knobs, floor: Floats) -> tuple[Ints, Floats]:
    """Token ids, of all tokens with at least the logit `floor`, and the mass of those; all are [num_rows]."""
    weights, sums = masses(logits, best, knobs.inverse_temperature, floor)
    rows = np.arange(len(logits))
    cumulative = sums.cumsum(1)  # [num_rows, num_blocks]
    total = cumulative[:, -1]
    target = knobs.uniform * total  # less than the total, also when rounded: a uniform number is at most 1 - 2**-53
    block = (cumulative <= target[:, None]).sum(1)
    inside = weights[rows, block].cpu().numpy().astype(np.float64).cumsum(1)  # [num_rows, BLOCK_SIZE]
    before = np.where(block > 0, cumulative[rows, block - 1], 0.0)
    target = np.minimum(target - before, np.nextafter(inside[:, -1], 0.0))
    return block * weights.shape[2] + (inside <= target[:, None]).sum(1), total


def _draw_from_few(logits: Tensor, best: Floats, knobs: Knobs, total: Floats) -> tuple[Ints, Bools]:
    """Token ids, and which of them are valid.

    A row is not that keeps more tokens than are looked at here, or some, but not all, of those equal to the worst of
    them: then others with lower ids may not have been seen.
    """
    num_candidates = min(FEW + MARGIN, logits.shape[1])
    values, ids = leading(logits, num_candidates)
    ranked = np.sort(values, axis=1)[:, ::-1]
    num_kept = _num_kept(ranked, best, knobs, total)
    threshold = ranked[np.arange(len(ranked)), num_kept - 1]
    num_tied = num_kept - (ranked > threshold[:, None]).sum(1)  # of the tokens that equal the last one kept
    order = ids.argsort(1)
    values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    tied = values == threshold[:, None]
    kept = (values > threshold[:, None]) | (tied & (tied.cumsum(1) <= num_tied[:, None]))
    cumulative = np.where(kept, _weights(values, best, knobs), 0.0).cumsum(1)
    target = knobs.uniform * cumulative[:, -1]
    token_ids = ids[np.arange(len(ids)), (cumulative <= target[:, None]).sum(1)]
    if num_candidates == logits.shape[1]:
        return token_ids, np.ones(len(ids), dtype=np.bool_)
    return token_ids, (num_kept < num_candidates) & (threshold > ranked[:, -1])


def _num_kept(ranked: Floats, best: Floats, knobs: Knobs, total: Floats) -> Ints:
    """How many of the values [num_rows, num_candidates], best first, min_p, top_k and top_p keep; at least one."""
    num_above = (ranked >= knobs.floor(best)[:, None]).sum(1)
    limit: Ints = np.minimum(num_above, knobs.top_k)
    cumulative = _weights(ranked, best, knobs).cumsum(1)
    total = np.where(total > 0.0, total, cumulative[np.arange(len(ranked)), limit - 1])
    nucleus = 1 + (cumulative < (knobs.top_p * total)[:, None]).sum(1)  # the one that crosses top_p is kept
    return np.where(knobs.top_p >= 1.0, limit, np.minimum(limit, nucleus))


def _draw_from_many(logits: Tensor, best: Floats, knobs: Knobs) -> Ints:
    """Token ids [num_rows]; overwrites the logits. Thresholds are found row by row, and drawn above together."""
    floor = knobs.floor(best)
    for row in range(len(logits)):
        line = logits[row].cpu().numpy()
        floor[row], num_kept = _threshold(line, best[row], floor[row], knobs.rows(np.array([row])))
        equal = np.flatnonzero(line == floor[row])
        if num_surplus := np.count_nonzero(line > floor[row]) + len(equal) - num_kept:
            logits[row, torch.from_numpy(equal[-num_surplus:]).to(logits.device)] = -math.inf
    return _draw_above(logits, best, knobs, floor)[0]


def _threshold(
    line: Floats, best: np.floating[Any], floor: np.floating[Any], knobs: Knobs
) -> tuple[np.floating[Any], int]:
    """The worst logit that one row [vocab_size] keeps, and how many tokens it keeps, of equal ones only some.

    For top_p without a sort: tokens are counted and weighed in bins of almost equal logits, and just the bin in which
    the mass is reached is sorted.
    """
    top_k, top_p = int(knobs.top_k[0]), float(knobs.top_p[0])
    values = np.partition(line, len(line) - top_k)[len(line) - top_k :] if top_k < len(line) else line
    if floor > -math.inf:
        values = values[values >= floor]
    if top_p >= 1.0:
        return values.min(), len(values)
    below = (best - values) * knobs.inverse_temperature.astype(np.float32)  # in units of the exponent
    weights = np.exp(-below)
    bins = (below.clip(max=MAX_BELOW) * BINS_A_UNIT).astype(np.int64)
    mass = np.bincount(bins, weights).cumsum()
    target = top_p * mass[-1]
    crossed = min(int((mass < target).sum()), len(mass) - 1)
    inside = bins == crossed
    ranked = np.sort(values[inside])[::-1]
    reached = (mass[crossed - 1] if crossed else 0.0) + np.sort(weights[inside])[::-1].cumsum(dtype=np.float64)
    num_inside = min(int((reached < target).sum()), len(ranked) - 1) + 1
    return ranked[num_inside - 1], int(np.count_nonzero(bins < crossed)) + num_inside


def _weights(values: Floats, best: Floats, knobs: Knobs) -> Floats:
    """exp((logit - best) / temperature) in double, [num_rows, num_candidates]."""
    return np.exp((values.astype(np.float64) - best[:, None]) * knobs.inverse_temperature[:, None])
