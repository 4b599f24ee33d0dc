"""Draws a token from each row of logits: temperature, min_p, top_k, top_p, then inverse transform sampling.

The kept tokens are always a prefix of the tokens sorted by logit and, for equal logits, by id. If top_k or top_p apply,
masses are integers (`fixed_point`), so prefix and draw have the same bits on every device and in any order of
summation. The draw adds up masses in vocabulary order, so rounding that swaps two almost equally likely tokens does not
change the result. Does not use requests, nor produce random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pd_cluster.model.kernels.fixed_point import MASS_BITS, fixed_masses, share_of, sums_by_bin
from pd_cluster.model.sampling.row_passes import Bools, Floats, Ints, leading, masses, rows_of
from pd_cluster.types import Sampling

FEW = 64  # nearly all rows keep at most this many tokens, and are processed together
MARGIN = 16  # additional candidates, so that tokens equal to the last kept one are rarely missing
NUM_BINS = 4096  # bins for logits below the best one
# The relative error of a sum of float32 masses, from products over 44 octaves, sums within a block and the last bits.
MASS_ERROR = 2.0**-16
MAX_BELOW = 80.0  # distance below the best, divided by temperature; all less likely tokens share a bin


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """The parameters of each row's distribution; every field is [num_rows]. Each row is one draw."""

    inverse_temperature: Floats
    top_k: Ints  # the vocabulary's size if unlimited
    top_p: Floats
    log_min_p: Floats
    uniform: Floats  # in [0, 1)

    @classmethod
    def of(cls, params: Sequence[Sampling], uniform: Floats, vocab_size: int) -> DrawParameters:
        """Limits temperatures to between 1e-30 and 1e30, so that no product with them is NaN."""
        temperature = np.nan_to_num([p.temperature for p in params], nan=1.0).clip(1e-30, 1e30)
        min_p = np.nan_to_num([p.min_p for p in params]).clip(0.0, 1.0)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p)
        top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], dtype=np.int64)
        return cls(1.0 / temperature, top_k, np.array([p.top_p for p in params]), log_min_p, uniform)

    def rows(self, at: Ints | Bools) -> DrawParameters:
        return DrawParameters(
            self.inverse_temperature[at], self.top_k[at], self.top_p[at], self.log_min_p[at], self.uniform[at]
        )

    def floor(self, best: Floats) -> Floats:
        """Returns the smallest float32 logit that min_p keeps, [num_rows]; never above the best."""
        exact = best + self.log_min_p / self.inverse_temperature
        with np.errstate(over="ignore"):
            rounded = exact.astype(np.float32)
            return np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)


def draw(logits: Tensor, best: Floats, knobs: DrawParameters) -> Ints:
    """Returns token ids [num_rows] for logits [num_rows, vocab_size] float32 whose maxima are `best`, all finite."""
    num_rows, vocab_size = logits.shape
    token_ids = np.zeros(num_rows, dtype=np.int64)
    total = np.zeros(num_rows)  # approximate mass of all tokens that min_p keeps, for rows without top_k
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
    for row in np.flatnonzero(pending).tolist():
        line = logits[row].cpu().numpy()
        token_ids[row] = draw_from_many(line, best[row : row + 1], knobs.rows(np.array([row])))
    return token_ids


def _draw_above(logits: Tensor, best: Floats, knobs: DrawParameters, floor: Floats) -> tuple[Ints, Floats]:
    """Draws from all tokens whose logit is at least `floor`.

    Returns token ids and the total mass of the tokens drawn from, both [num_rows].
    """
    weights, sums = masses(logits, best, knobs.inverse_temperature, floor)
    rows = np.arange(len(logits))
    cumulative = sums.cumsum(1)  # [num_rows, num_blocks]
    total = cumulative[:, -1]
    target = knobs.uniform * total  # less than the total even after rounding: a uniform number is at most 1 - 2**-53
    block = (cumulative <= target[:, None]).sum(1)
    inside = weights[rows, block].cpu().numpy().astype(np.float64).cumsum(1)  # [num_rows, BLOCK_SIZE]
    before = np.where(block > 0, cumulative[rows, block - 1], 0.0)
    target = np.minimum(target - before, np.nextafter(inside[:, -1], 0.0))
    return block * weights.shape[2] + (inside <= target[:, None]).sum(1), total


def _draw_from_few(logits: Tensor, best: Floats, knobs: DrawParameters, total: Floats) -> tuple[Ints, Bools]:
    """Returns token ids, and which are valid; `total`: the approximate mass of all tokens that min_p keeps.

    A row is invalid if it keeps more tokens than there are candidates, or only some of the tokens that tie with its
    last kept token, because tied tokens with lower ids may be missing. It is also invalid if `total` is too inexact to
    determine how many tokens top_p keeps.
    """
    num_candidates = min(FEW + MARGIN, logits.shape[1])
    values, ids = leading(logits, num_candidates)
    ranked = np.sort(values, axis=1)[:, ::-1]
    num_kept, is_certain = _num_kept(ranked, best, knobs, total, num_candidates == logits.shape[1])
    threshold = ranked[np.arange(len(ranked)), num_kept - 1]
    num_tied = num_kept - (ranked > threshold[:, None]).sum(1)  # kept tokens that tie with the last kept one
    order = ids.argsort(1)
    values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    tied = values == threshold[:, None]
    kept = (values > threshold[:, None]) | (tied & (tied.cumsum(1) <= num_tied[:, None]))
    cumulative = np.where(kept, fixed_masses(values, best, knobs.inverse_temperature), 0).cumsum(1)
    token_ids = ids[np.arange(len(ids)), (cumulative <= _target(knobs, cumulative[:, -1])[:, None]).sum(1)]
    if num_candidates == logits.shape[1]:
        return token_ids, np.ones(len(ids), dtype=np.bool_)
    return token_ids, is_certain & (num_kept < num_candidates) & (threshold > ranked[:, -1])


def _target(knobs: DrawParameters, total: Ints) -> Ints:
    """Returns the cumulative mass, in vocabulary order, that selects the drawn token; below the total, [num_rows]."""
    found: Ints = np.minimum(share_of(knobs.uniform, total), total - 1)
    return found


def _num_kept(ranked: Floats, best: Floats, knobs: DrawParameters, total: Floats, is_all: bool) -> tuple[Ints, Bools]:
    """Returns how many candidates min_p, top_k and top_p keep in each row, at least one, and whether this is certain.

    `ranked` [num_rows, num_candidates]: their logits, best first. `is_all`: they are the whole vocabulary.
    """
    num_above = (ranked >= knobs.floor(best)[:, None]).sum(1)
    limit: Ints = np.minimum(num_above, knobs.top_k)
    cumulative = fixed_masses(ranked, best, knobs.inverse_temperature).cumsum(1)
    exact = cumulative[np.arange(len(ranked)), limit - 1]
    error = np.where((total > 0.0) & ~np.bool_(is_all), MASS_ERROR, 0.0)
    total = np.where(error > 0.0, total * float(1 << MASS_BITS), exact)
    least, most = (share_of(knobs.top_p, total * (1.0 + sign * error))[:, None] for sign in (-1, 1))
    nucleus = 1 + (cumulative < most).sum(1)  # the token that crosses top_p is kept
    is_certain = (error == 0.0) | (nucleus == 1 + (cumulative < least).sum(1))
    return np.where(knobs.top_p >= 1.0, limit, np.minimum(limit, nucleus)), is_certain


def draw_from_many(line: Floats, best: Floats, knobs: DrawParameters) -> int:
    """Returns a token id for one row [vocab_size]; `best` and `knobs` have one entry."""
    kept = kept_of(line, best, knobs)
    cumulative = kept.masses.cumsum()
    at = int(np.searchsorted(cumulative, _target(knobs, cumulative[-1:])[0], side="right"))
    return at if kept.ids is None else int(kept.ids[at])


class KeptTokens(NamedTuple):
    """The tokens that one row may keep, in vocabulary order."""

    threshold: np.floating[Any]  # the smallest logit that is kept
    num_kept: int
    ids: Ints | None  # None: the whole vocabulary
    masses: Ints  # zero for tokens that are not kept


def kept_of(line: Floats, best: Floats, knobs: DrawParameters) -> KeptTokens:
    """Returns the tokens that one row [vocab_size] keeps; `best` and `knobs` have one entry."""
    top_k, floor = int(knobs.top_k[0]), knobs.floor(best)[0]
    if top_k < len(line):
        floor = max(floor, np.partition(line, len(line) - top_k)[len(line) - top_k])
    ids, values = None, line
    if top_k < len(line) or floor > -math.inf:
        ids = np.flatnonzero(line >= floor)
        ids = _without_surplus(ids, line[ids] == floor, len(ids) - top_k)
        values = line[ids]
    masses = fixed_masses(values[None], best, knobs.inverse_temperature)[0]
    if knobs.top_p[0] >= 1.0:
        return KeptTokens(values.min(), len(values), ids, masses)
    threshold, num_kept = _nucleus(values, masses, best, knobs)
    is_kept = values >= threshold
    if num_surplus := int(np.count_nonzero(is_kept)) - num_kept:
        is_kept[np.flatnonzero(values == threshold)[-num_surplus:]] = False
    masses *= is_kept
    return KeptTokens(threshold, num_kept, ids, masses)


def _without_surplus(ids: Ints, is_worst: Bools, num_surplus: int) -> Ints:
    return np.delete(ids, np.flatnonzero(is_worst)[-num_surplus:]) if num_surplus > 0 else ids


def _nucleus(values: Floats, masses: Ints, best: Floats, knobs: DrawParameters) -> tuple[np.floating[Any], int]:
    """Returns the lowest logit that top_p keeps among one row's values, and the number of tokens kept.

    Sorts only the bin of almost equal logits in which the mass is reached. The bins divide the row's own range, because
    in a flat row all tokens would be in one bin of fixed width.
    """
    with np.errstate(over="ignore"):
        below = (best - values) * knobs.inverse_temperature.astype(np.float32)  # distances from the best, as exponents
    np.minimum(below, MAX_BELOW, out=below)
    below /= max(below.max(), np.finfo(np.float32).tiny)
    below *= NUM_BINS
    bins = below.astype(np.int64)
    reached = sums_by_bin(bins, masses).cumsum()
    target = share_of(knobs.top_p, reached[-1:])[0]
    crossed = int((reached < target).sum())
    ranked = np.sort(values[bins == crossed])[::-1]
    sums = fixed_masses(ranked[None], best, knobs.inverse_temperature)[0].cumsum()
    before = reached[crossed - 1] if crossed else 0
    num_inside = int((before + sums < target).sum()) + 1
    return ranked[num_inside - 1], int(np.count_nonzero(bins < crossed)) + num_inside
