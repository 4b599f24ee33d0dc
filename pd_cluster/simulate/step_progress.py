"""Computes the time of a running step, or of several equal steps, at varying speed. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

ALMOST = 1e-9  # a cut this close to a step's end (as a share of the step) counts as one after the end


@dataclass(frozen=True, slots=True)
class StepRun:
    """`num_steps` steps. At full speed, the first takes `first_s`, and each is `growth_s` longer than the previous."""

    first_s: float
    growth_s: float = 0.0
    num_steps: int = 1

    def seconds(self, num_steps: int) -> float:
        return num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) / 2)

    def num_begun(self, seconds: float) -> int:
        """Returns how many steps have begun after this many seconds: at least one and at most all."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= seconds - ALMOST * self.first_s:
                high = middle
            else:
                low = middle + 1
        return low

    def num_within(self, seconds: float) -> int:
        """Returns how many steps can begin within this many seconds; at least one."""
        if self.growth_s > 0.0:
            half = self.first_s - self.growth_s / 2
            found = (math.sqrt(half * half + 2 * self.growth_s * seconds) - half) / self.growth_s
        else:
            found = seconds / self.first_s if self.first_s else math.inf
        return max(1, math.ceil(min(found, 1e9)))


class RunProgress:
    """The progress of a run. `factor`: the factor by which its steps currently take longer."""

    def __init__(self, run: StepRun, now_s: float, factor: float) -> None:
        self.run, self.factor = run, factor
        self.begun_s = self._at_s = now_s
        self._done_s = 0.0  # finished work, in seconds at full speed

    def _pass(self, now_s: float) -> None:
        self._done_s += (now_s - self._at_s) / self.factor
        self._at_s = now_s

    def slow(self, now_s: float, factor: float) -> None:
        self._pass(now_s)
        self.factor = factor

    def cut(self, now_s: float) -> None:
        """Ends the run with the current step."""
        self._pass(now_s)
        self.run = StepRun(self.run.first_s, self.run.growth_s, self.run.num_begun(self._done_s))

    @property
    def end_s(self) -> float:
        return self._at_s + max(0.0, self.run.seconds(self.run.num_steps) - self._done_s) * self.factor
