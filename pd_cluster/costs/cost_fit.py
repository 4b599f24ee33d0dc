"""Fits a step's linear terms to measured steps: non-negative least squares of relative errors, in plain Python.

Keeps only terms that explain more than noise (Schwarz's criterion), so few or similar samples give few terms. If
samples cannot separate two terms, the earlier one in `TERMS` is kept: prompts get a time per token, and decode steps a
constant time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from pd_cluster.costs.linear_costs import StepCost, StepWork

TERMS = ("prompt_token_s", "step_s", "row_s", "context_token_s", "prompt_pair_s")  # preferred first
LEAST_PIVOT = 1e-9  # the diagonal is 1, so smaller pivots mean that columns depend on each other, up to rounding
LEAST_ERROR = 1e-5  # smaller relative errors count as equal
MOST_BREAKPOINTS = 48

Sample = tuple[StepWork, float]
Matrix = list[list[float]]


def columns_of(work: StepWork, num_flat_rows: int = 0) -> tuple[float, ...]:
    """Returns the factor of each of `TERMS`."""
    num_rows, num_tokens = work.num_rows_beyond(num_flat_rows), work.num_prompt_tokens_beyond(num_flat_rows)
    return num_tokens, 1.0, num_rows, work.num_context_tokens, work.num_prompt_pairs


def fit_step(samples: Sequence[Sample]) -> tuple[StepCost, float]:
    """Returns the cost of a step, and the mean of |predicted - measured| / measured over these steps.

    A sample is a step's work and its seconds. Ignores samples without work or time. Raises ValueError if none is left.
    """
    counted = [(work, took_s) for work, took_s in samples if took_s > 0 and (work.num_rows or work.num_prompt_tokens)]
    if not counted:
        raise ValueError("no step with work and time to fit")
    best: tuple[float, StepCost] | None = None
    for num_flat_rows in _breakpoints(counted):
        score, terms = _fit(counted, num_flat_rows)
        if best is None or score < best[0]:
            kept = any(terms.get(name, 0.0) > 0 for name in ("row_s", "prompt_token_s"))
            best = score, StepCost(**terms, num_flat_rows=num_flat_rows if kept else 0)
    assert best is not None
    return best[1], mean_error(best[1], counted)


def mean_error(cost: StepCost, samples: Sequence[Sample]) -> float:
    """Returns the mean of |predicted - measured| / measured; 0 if there are no samples."""
    errors = [abs(cost.seconds(work) - took_s) / took_s for work, took_s in samples if took_s > 0]
    return sum(errors) / len(errors) if errors else 0.0


def _breakpoints(samples: Sequence[Sample]) -> list[int]:
    """Returns candidates for the number of free rows: 0, and measured numbers of rows and of prompt tokens.

    The two largest numbers of each kind are left out, because the slope beyond the free rows needs them.
    """
    rows, tokens = ({getattr(work, name) for work, _ in samples} - {0} for name in ("num_rows", "num_prompt_tokens"))
    measured = sorted({*sorted(rows)[:-2], *sorted(tokens)[:-2]})
    return [0, *measured[:: -(-len(measured) // MOST_BREAKPOINTS) or 1]]


def _fit(samples: Sequence[Sample], num_flat_rows: int) -> tuple[float, dict[str, float]]:
    """Returns the best set of terms and its value of Schwarz's criterion, of which lower is better."""
    rows = [[column / took_s for column in columns_of(work, num_flat_rows)] for work, took_s in samples]
    sums = [math.fsum(row[at] ** 2 for row in rows) for at in range(len(TERMS))]
    present = [at for at in range(len(TERMS)) if sums[at] > 0]
    scale = [1 / math.sqrt(total) if total else 0.0 for total in sums]  # columns of length 1
    matrix = [
        [math.fsum(row[a] * row[b] for row in rows) * scale[a] * scale[b] for b in range(len(TERMS))]
        for a in range(len(TERMS))
    ]
    right = [math.fsum(row[at] for row in rows) * scale[at] for at in range(len(TERMS))]
    best_score, best_terms = math.inf, dict[str, float]()
    for chosen in _subsets(present):
        found = solve([[matrix[a][b] for b in chosen] for a in chosen], [right[a] for a in chosen])
        if found is None or min(found) < 0:
            continue
        terms = [value * scale[at] for at, value in zip(chosen, found, strict=True)]
        left = math.fsum((1 - sum(term * row[at] for at, term in zip(chosen, terms, strict=True))) ** 2 for row in rows)
        num_terms = len(chosen) + bool(num_flat_rows)
        variance = max(left / len(rows), LEAST_ERROR**2)
        score = len(rows) * math.log(variance) + num_terms * math.log(len(rows) + 1)
        if score < best_score - 1e-9:
            best_score, best_terms = score, {TERMS[at]: term for at, term in zip(chosen, terms, strict=True)}
    return best_score, best_terms


def _subsets(of: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(of, size) for size in range(1, len(of) + 1))


def solve(matrix: Matrix, right: Sequence[float]) -> list[float] | None:
    """Solves a symmetric system by elimination. Returns None if its columns are dependent."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at, row in enumerate(rows):
        if row[at] < LEAST_PIVOT:
            return None
        for other in rows[at + 1 :]:
            factor = other[at] / row[at]
            for column in range(at, len(row)):
                other[column] -= factor * row[column]
    found = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        row = rows[at]
        found[at] = (row[-1] - sum(row[b] * found[b] for b in range(at + 1, len(rows)))) / row[at]
    return found
