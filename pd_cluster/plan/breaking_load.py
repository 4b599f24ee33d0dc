"""Finds the load at which a layout breaks, by bisection on a factor of the trace's rate."""

from __future__ import annotations

from collections.abc import Callable

MOST = 64.0  # the largest factor; its inverse is the smallest
PRECISION = 1.1  # the breaking load is at most this many times the result


def highest_factor(is_met: Callable[[float], bool]) -> float:
    """Returns the highest factor that meets the goals; 0 if even the lowest does not."""
    low, high = 1.0, 1.0
    if is_met(1.0):
        while is_met(high := high * 2):
            low = high
            if high >= MOST:
                return high
    else:
        while not is_met(low := low / 2):
            high = low
            if low <= 1 / MOST:
                return 0.0
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
