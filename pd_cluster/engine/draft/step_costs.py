"""How long steps of so many rows take, as measured. Numbers only, no clock of its own."""

from __future__ import annotations

from bisect import bisect_left

# Numbers of rows, ascending
SIZES: tuple[int, ...] = (
    *range(1, 9),
    *range(10, 17, 2),
    *range(20, 33, 4),
    *range(40, 65, 8),
    *range(80, 257, 16),
    *range(320, 513, 64),
    1024,
)
WEIGHT = 0.2  # of the newest step
KEPT_STEPS = 512  # a size that has not been measured for so long is measured again
TRIED_FACTOR = 2  # up to so many times the largest known size, another is tried


class StepCosts:
    """Step times by number of rows, for steps in which every sequence computes one token."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, int]] = {}  # by size: seconds, and the step that measured it last
        self._num_steps = 0

    def took(self, num_rows: int, seconds: float) -> None:
        """Takes a step's time into account."""
        self._num_steps += 1
        size = size_of(num_rows)
        known_s = self._known_s(size)
        now_s = seconds if known_s is None else known_s + WEIGHT * (seconds - known_s)
        self._times[size] = now_s, self._num_steps

    def knows(self, num_rows: int) -> bool:
        return self._known_s(size_of(num_rows)) is not None

    def _known_s(self, size: int) -> float | None:
        seconds, step = self._times.get(size, (0.0, -KEPT_STEPS))
        return seconds if self._num_steps - step < KEPT_STEPS else None

    def step_s(self, num_rows: int) -> float:
        """Returns what a step of so many rows takes, in seconds: measured, or on the line between two that are.

        Beyond the largest size that is known, it is as quick as that, so that it is tried, but infinite beyond
        TRIED_FACTOR times as many rows: a wrong guess costs little. One below all that are known takes as long.
        """
        size = size_of(num_rows)
        at = bisect_left(SIZES, size)
        below = next((each for each in SIZES[at::-1] if self._known_s(each) is not None), None)
        above = next((each for each in SIZES[at:] if self._known_s(each) is not None), None)
        if below is None:
            return self._times[above][0] if above is not None else float("inf")
        if above is None:
            return self._times[below][0] if size <= TRIED_FACTOR * below else float("inf")
        below_s, above_s = self._times[below][0], self._times[above][0]
        return below_s if above == below else below_s + (above_s - below_s) * (size - below) / (above - below)


def size_of(num_rows: int) -> int:
    """Returns the smallest size of steps with at least so many rows; the largest for more."""
    return SIZES[min(bisect_left(SIZES, num_rows), len(SIZES) - 1)]
