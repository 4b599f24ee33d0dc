"""Stores the measured times of steps by number of rows. Has no clock."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

# Numbers of rows, ascending.
SIZES: tuple[int, ...] = (
    *range(1, 9),
    *range(10, 17, 2),
    *range(20, 33, 4),
    *range(40, 65, 8),
    *range(80, 257, 16),
    *range(320, 513, 64),
    1024,
)
WEIGHT = 0.2  # the weight of the newest step
MAX_AGE_STEPS = 512  # a size that has not been measured for this many steps is measured again
# Replaces MAX_AGE_STEPS after one measurement, which other work may have slowed; each further one doubles it.
FIRST_MAX_AGE_STEPS = 64
NUM_TRIED = 3  # first steps of a size; only the fastest counts, because the first one initializes and any may be slow
TRIED_FACTOR = 2  # sizes of up to this many times the largest known size may be tried
NEVER = float("inf")


class StepCosts:
    """Step times by number of rows, for steps in which every sequence computes one token.

    An unknown size is interpolated linearly between its neighbours. Sizes above the largest known one are extrapolated
    from the last two, up to TRIED_FACTOR times as many rows; beyond that, the estimate is infinite, so that a wrong
    guess costs little. A size below the smallest known one is assumed to take as long as that one.
    """

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, int]] = {}  # by index of size: seconds, and the step that measured it last
        self._num_steps = 0
        self._kept_steps: dict[int, int] = {}  # by index of size: for how many steps its time is valid
        self._tried: dict[int, list[float]] = {}  # by index of size: seconds, until there are NUM_TRIED
        self._estimates: list[float] = []  # by index of size; empty: not computed yet

    def took(self, num_rows: int, seconds: float) -> None:
        """Records a step's time."""
        self._num_steps += 1
        at = index_of(num_rows)
        now_s = self._known_s(at)
        if now_s is None:
            tried = self._tried.setdefault(at, [])
            tried.append(seconds)
            if len(tried) < NUM_TRIED:
                return
            now_s = min(self._tried.pop(at))
        else:
            now_s += WEIGHT * (seconds - now_s)
        self._times[at] = now_s, self._num_steps
        self._kept_steps[at] = min(MAX_AGE_STEPS, 2 * self._kept_steps.get(at, FIRST_MAX_AGE_STEPS // 2))
        self._estimates.clear()

    def passed(self) -> None:
        """Counts a step that was not measured, so that known times age."""
        self._num_steps += 1
        self._estimates.clear()

    def knows(self, num_rows: int) -> bool:
        return self._known_s(index_of(num_rows)) is not None

    def _known_s(self, at: int) -> float | None:
        seconds, step = self._times.get(at, (0.0, 0))
        return seconds if self._num_steps - step < self._kept_steps.get(at, 0) else None

    def step_s(self, num_rows: int) -> float:
        """Returns the time of a step of this many rows, in seconds; infinity if unknown."""
        return self.estimates()[index_of(num_rows)]

    def estimates(self) -> list[float]:
        """Returns the estimated seconds of a step for each of SIZES."""
        if not self._estimates:
            self._estimates += self._estimated()
        return self._estimates

    def _estimated(self) -> list[float]:
        known = {at: seconds for at in sorted(self._times) if (seconds := self._known_s(at)) is not None}
        if not known:
            return [NEVER] * len(SIZES)
        first, *_, last = [*known, *known]
        found, slope = [known[first]] * (first + 1), 0.0
        for below, above in pairwise(known):
            slope = (known[above] - known[below]) / (SIZES[above] - SIZES[below])
            found += [known[below] + slope * (SIZES[at] - SIZES[below]) for at in range(below + 1, above + 1)]
        most = TRIED_FACTOR * SIZES[last]
        slope = max(0.0, slope)
        behind = SIZES[last + 1 :]
        return found + [known[last] + slope * (size - SIZES[last]) if size <= most else NEVER for size in behind]


def index_of(num_rows: int) -> int:
    """Returns the index of the smallest size with at least this many rows, or of the largest size."""
    return min(bisect_left(SIZES, num_rows), len(SIZES) - 1)
