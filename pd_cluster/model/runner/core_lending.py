"""Decides, from measured step times, whether a step with few tokens uses lent cores. Callers pass the current time.

Memory bandwidth limits such a step, and a few cores nearly saturate it. Each operation of the step waits for its
slowest thread. So lent cores make the step slower if other programs, or the process's own sending of tokens, sometimes
use these cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_TOKENS = 64  # larger steps are limited by arithmetic and always use lent cores
GAIN = 0.9  # lent cores are used if a step with them takes less than this share of the time without them
NUM_TRIED = 4  # consecutive steps measured in a trial, with lent cores and without
TRIED_AGAIN_S = 20.0  # the slower alternative is measured again after this time
MOST_TRYING_S = 5.0  # a trial ends after this time, even if no step could be measured
WEIGHT = 0.3  # the weight of the newest step in the moving average


@dataclass(slots=True)
class _StepTimes:
    """The measured times of steps of similar size, either with lent cores or without."""

    tried_s: float
    step_s: float = 0.0
    num_left: int = NUM_TRIED  # steps still to measure before the times are compared

    def try_again(self, now_s: float) -> None:
        self.step_s, self.num_left, self.tried_s = 0.0, NUM_TRIED, now_s

    def add(self, took_s: float, now_s: float) -> None:
        self.step_s = took_s if not self.step_s else WEIGHT * took_s + (1 - WEIGHT) * self.step_s
        self.num_left = max(0, self.num_left - 1)
        self.tried_s = now_s


@dataclass(slots=True)
class CoreLending:
    """Measures the steps of one rank. Call `begin`, then `takes` between layers, then `end`; times are in seconds."""

    _ways: dict[int, tuple[_StepTimes, _StepTimes]] = field(default_factory=dict)  # size -> (without, with)
    _pair: tuple[_StepTimes, _StepTimes] | None = None
    _is_wanted: bool = True
    _is_clean: bool = False  # lent cores were available during the whole step so far
    _began_s: float = 0.0

    def begin(self, num_tokens: int, now_s: float) -> None:
        self._pair = None
        self._is_wanted = True
        if num_tokens > MOST_TOKENS:
            return
        own, lent = self._pair = self._ways.setdefault(num_tokens.bit_length(), (_StepTimes(now_s), _StepTimes(now_s)))
        self._is_clean = True
        self._began_s = now_s
        for each in (lent, own):
            if each.num_left and now_s - each.tried_s < MOST_TRYING_S:
                self._is_wanted = each is lent
                return
        if not own.step_s or not lent.step_s:
            self._is_wanted = True
        else:
            self._is_wanted = lent.step_s < GAIN * own.step_s
        other = own if self._is_wanted else lent
        if now_s - other.tried_s > TRIED_AGAIN_S:
            other.try_again(now_s)
            self._is_wanted = not self._is_wanted

    def takes(self, is_offered: bool) -> bool:
        """Returns whether this step uses lent cores now. `is_offered`: lent cores are available."""
        self._is_clean = self._is_clean and is_offered
        return is_offered and self._is_wanted

    def end(self, now_s: float) -> None:
        """Records the time of a step if lent cores were available from its start to its end."""
        if self._pair is not None and self._is_clean:
            self._pair[self._is_wanted].add(now_s - self._began_s, now_s)
