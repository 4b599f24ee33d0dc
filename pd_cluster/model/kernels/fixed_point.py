"""Probability masses as integers: their sums are exact in any order, so every device keeps and draws the same tokens.

A mass is 2 ** x for x = (logit - best) / temperature * log2(e), in units of 2 ** -MASS_BITS, computed only with
additions and multiplications of doubles, each rounded separately. So numpy, torch and Triton
(cuda/sampling/draw_kernels.py) get the same bits, although their libraries' functions differ in the last bits. Does not
choose tokens.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MASS_BITS: Final = 42  # the sum for two million equally likely tokens fits 64 bits
MAX_VOCAB_SIZE: Final = 1 << 21
AT_ONCE: Final = 1 << 14  # values that numpy processes together, so that they stay in the cache
LOG2_E: Final = 1.4426950408889634
LEAST_EXPONENT: Final = -60.0  # masses are already zero below -43
ROUNDER: Final = 6755399441055744.0  # 1.5 * 2 ** 52: adding and subtracting it rounds to the nearest integer
# ln(2) ** k / k!, for exponents of -0.5 to 0.5: the error is below 1e-12. Constants, since libraries' powers differ.
TAYLOR: Final = (
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.5252733804059841e-05,
    1.321548679014431e-06,
    1.01780860092397e-07,
    7.054911620801123e-09,
)


def fixed_masses(values: Any, best: Any, inverse_temperature: Any) -> Any:
    """Returns the masses, int64, of logits [num_rows, num_tokens] float32; `best` are the maxima of the rows.

    `best` and `inverse_temperature`, both [num_rows], and the logits are all from numpy or all from torch. -inf has
    mass 0; no logit may be NaN or above its row's `best`.
    """
    assert values.shape[1] <= MAX_VOCAB_SIZE, f"{values.shape[1]} tokens; exact sums support {MAX_VOCAB_SIZE}"
    factor = (_double(inverse_temperature) * LOG2_E)[:, None]
    if isinstance(values, Tensor):
        return _masses(values, _double(best)[:, None], factor)
    found = np.empty(values.shape, dtype=np.int64)
    width = max(1, AT_ONCE // max(1, len(values)))
    for start in range(0, values.shape[1], width):
        part = slice(start, start + width)
        found[:, part] = _masses(values[:, part], _double(best)[:, None], factor)
    return found


def _masses(values: Any, best: Any, factor: Any) -> Any:
    """Returns the masses of [num_rows, num_tokens]; `best` and `factor` are [num_rows, 1] doubles."""
    exponent = _double(values) - best
    exponent *= factor
    exponent = exponent.clip(min=LEAST_EXPONENT)
    whole = exponent + ROUNDER
    whole -= ROUNDER
    exponent -= whole
    power = exponent * TAYLOR[-1]
    for coefficient in TAYLOR[-2::-1]:
        power += coefficient
        power *= exponent
    power += 1.0
    power *= float(1 << MASS_BITS)
    return _whole(power) >> _whole(-whole)


def share_of(fraction: Any, total: Any) -> Any:
    """Returns a fraction of a sum of masses, rounded down; both [num_rows], from numpy or torch."""
    return _whole(fraction * _double(total))


def _double(numbers: Any) -> Any:
    return numbers.double() if isinstance(numbers, Tensor) else np.asarray(numbers, dtype=np.float64)


def _whole(numbers: Any) -> Any:
    return numbers.long() if isinstance(numbers, Tensor) else numbers.astype(np.int64)


def sums_by_bin(bins: NDArray[np.int64], masses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the exact sum of masses in each bin. numpy sums doubles, so each half of the bits is summed apart."""
    half = MASS_BITS // 2
    high, low = np.bincount(bins, masses >> half), np.bincount(bins, masses & ((1 << half) - 1))
    found: NDArray[np.int64] = (high.astype(np.int64) << half) + low.astype(np.int64)
    return found
