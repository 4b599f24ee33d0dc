"""Draws a token of each row of logits: temperature, min_p, top_k, top_p, then inverse transform sampling.

What is kept is always a prefix of the tokens sorted by logit and, among equals, by id. It is found from sorted values
alone, and the draw sums in the vocabulary's order: then neither the order in which equal values are found, nor two
almost equally likely tokens that change places as rounding has it, changes what is drawn.
Knows nothing of requests, nor where random numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pd_cluster.model.passes import Bools, Floats, Ints, at_least, leading, masses, rows_of
from pd_cluster.types import SamplingParams

FEW = 64  # tokens kept by all but a few rows; such rows are looked at together
MARGIN = 16  # candidates beyond, so that tokens equal to the last one kept are seldom cut off
MANY = 1024  # tokens looked at first where top_p keeps more than a few


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
        temperature = np.array([p.temperature for p in params]).clip(1e-30, 1e30)
        min_p = np.array([p.min_p for p in params]).clip(0.0, 1.0)
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
    total = np.zeros(num_rows)  # mass of all tokens, where top_k does not limit them
    unlimited = knobs.top_k == vocab_size
    if unlimited.any():
        at = np.flatnonzero(unlimited)
        token_ids[at], total[at] = _draw_from_all(rows_of(logits, at), best[at], knobs.rows(at))
    pending = ~unlimited | (knobs.top_p < 1.0)
    at = np.flatnonzero(pending & (unlimited | (knobs.top_k <= FEW)))
    if len(at):
        token_ids[at], done = _draw_from_few(rows_of(logits, at), best[at], knobs.rows(at), total[at])
        pending[at[done]] = False
    for row in np.flatnonzero(pending).tolist():
        one = np.array([row])
        token_ids[row] = _draw_from_many(logits, row, best[one], knobs.rows(one), total[one])
    return token_ids


def _draw_from_all(logits: Tensor, best: Floats, knobs: Knobs) -> tuple[Ints, Floats]:
    """Token ids and the mass of all tokens, both [num_rows]; only min_p limits."""
    weights, sums = masses(logits, best, knobs.inverse_temperature, knobs.floor(best))
    rows = np.arange(len(logits))
    cumulative = sums.cumsum(1)  # [num_rows, num_blocks]
    total = cumulative[:, -1]
    target = _target(knobs.uniform, total)
    block = (cumulative <= target[:, None]).sum(1)
    inside = weights[rows, block].cpu().numpy().astype(np.float64).cumsum(1)  # [num_rows, BLOCK_SIZE]
    before = cumulative[rows, block] - sums[rows, block]
    target = np.minimum(target - before, np.nextafter(inside[:, -1], 0.0))
    return block * weights.shape[2] + (inside <= target[:, None]).sum(1), total


def _target(uniform: Floats, total: Floats) -> Floats:
    """Where in the cumulative sum to stop; below the total, so that the first sum above it adds a token with weight."""
    return np.minimum(uniform * total, np.nextafter(total, 0.0))


def _draw_from_few(logits: Tensor, best: Floats, knobs: Knobs, total: Floats) -> tuple[Ints, Bools]:
    """Token ids, and which of them are valid: a row that keeps more tokens than are looked at here is not."""
    num_candidates = min(FEW + MARGIN, logits.shape[1])
    values, ids = leading(logits, num_candidates)
    ranked = np.sort(values, axis=1)[:, ::-1]
    num_kept = _num_kept(ranked, best, knobs, total)
    threshold = ranked[np.arange(len(ranked)), num_kept - 1]
    num_tied = num_kept - (ranked > threshold[:, None]).sum(1)
    order = ids.argsort(1)
    values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    token_ids = _draw_kept(values, ids, threshold, num_tied, best, knobs)
    if num_candidates == logits.shape[1]:
        return token_ids, np.ones(len(ids), dtype=np.bool_)
    done = num_kept < num_candidates
    # Tokens that equal the last one kept, and have lower ids, may be missing among the candidates.
    for row in np.flatnonzero(done & (threshold == ranked[:, -1])).tolist():
        one = np.array([row])
        token_ids[row] = _draw_by_threshold(logits, row, ranked[row], int(num_kept[row]), best[one], knobs.rows(one))
    return token_ids, done


def _draw_from_many(logits: Tensor, row: int, best: Floats, knobs: Knobs, total: Floats) -> int:
    """A token of one row, of which more are looked at until those that are kept are among them."""
    line = logits[row].cpu().numpy()
    vocab_size = len(line)
    top_k = int(knobs.top_k[0])
    size = top_k if top_k < vocab_size else min(MANY, vocab_size)
    while True:
        ranked = np.sort(np.partition(line, vocab_size - size)[vocab_size - size :])[::-1]
        num_kept = int(_num_kept(ranked[None], best, knobs, total)[0])
        if num_kept < size or size in (top_k, vocab_size):
            return _draw_by_threshold(logits, row, ranked, num_kept, best, knobs)
        size = min(8 * size, vocab_size)


def _num_kept(ranked: Floats, best: Floats, knobs: Knobs, total: Floats) -> Ints:
    """How many of the values [num_rows, num_candidates], best first, min_p, top_k and top_p keep; at least one."""
    weights = _weights(ranked, best, knobs)
    within = np.arange(ranked.shape[1]) < knobs.top_k[:, None]
    weights[~within | (ranked < knobs.floor(best)[:, None])] = 0.0
    cumulative = weights.cumsum(1)
    total = np.where(total > 0.0, total, cumulative[:, -1])
    before = np.zeros_like(cumulative)
    before[:, 1:] = cumulative[:, :-1]
    unlimited = knobs.top_p[:, None] >= 1.0
    kept = (weights > 0.0) & (unlimited | (before < (knobs.top_p * total)[:, None]))
    num_kept: Ints = np.maximum(kept.sum(1), 1)
    return num_kept


def _draw_by_threshold(logits: Tensor, row: int, ranked: Floats, num_kept: int, best: Floats, knobs: Knobs) -> int:
    """One token of one row of which the `num_kept` best tokens take part, found by looking at the whole row."""
    threshold = ranked[num_kept - 1 : num_kept]
    num_tied = np.array([num_kept - np.count_nonzero(ranked > threshold)])
    values, ids = at_least(logits, row, threshold[0])
    return int(_draw_kept(values[None], ids[None], threshold, num_tied, best, knobs)[0])


def _draw_kept(values: Floats, ids: Ints, threshold: Floats, num_tied: Ints, best: Floats, knobs: Knobs) -> Ints:
    """Token ids [num_rows], drawn from candidates [num_rows, num_candidates] whose ids ascend.

    Those above the row's threshold take part, and the first `num_tied` that equal it.
    """
    tied = values == threshold[:, None]
    kept = (values > threshold[:, None]) | (tied & (tied.cumsum(1) <= num_tied[:, None]))
    cumulative = np.where(kept, _weights(values, best, knobs), 0.0).cumsum(1)
    target = _target(knobs.uniform, cumulative[:, -1])
    token_ids: Ints = ids[np.arange(len(ids)), (cumulative <= target[:, None]).sum(1)]
    return token_ids


def _weights(values: Floats, best: Floats, knobs: Knobs) -> Floats:
    """exp((logit - best) / temperature) in double, [num_rows, num_candidates]."""
    return np.exp((values.astype(np.float64) - best[:, None]) * knobs.inverse_temperature[:, None])
