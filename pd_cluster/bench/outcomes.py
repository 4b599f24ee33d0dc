"""Outcomes of a load's requests, measured or simulated, and the goals that they are compared with.

Reports are made only from these, so reports of simulated and measured loads have the same form.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

import msgspec

GAP_BUCKET = 1.01  # ratio of a bucket's bounds
LEAST_GAP_S = 1e-6


class Slo(msgspec.Struct, frozen=True):
    """Goals in seconds; 0: no goal. `tpot_s`: the mean time of an output token after the first."""

    ttft_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    tpot_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    e2e_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0

    def met_by(self, outcome: Outcome) -> bool:
        """Whether the request was answered within every goal."""
        if outcome.error or outcome.first_s is None or outcome.last_s is None:
            return False
        found = ((self.ttft_s, outcome.ttft_s), (self.tpot_s, outcome.tpot_s), (self.e2e_s, outcome.e2e_s))
        return all(not goal or taken is None or taken <= goal for goal, taken in found)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The client's view of a request. Times are seconds after the load's start."""

    request_id: str
    sent_s: float
    first_s: float | None = None  # when its first token came
    last_s: float | None = None  # when its last token came
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the cache of the instance that computed the prompt
    num_output_tokens: int = 0
    longest_gap_s: float = 0.0  # the longest time between two of its tokens
    late_s: float = 0.0  # delay between its planned time and its sending
    prefill_s: float | None = None  # the time from sending until its prompt was computed
    handover_s: float | None = None  # the time from then until its KV cache was at the decode instance
    prefill: str = ""  # the names of its instances
    decode: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for an answer of one token."""
        if self.first_s is None or self.last_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)


class InstanceSample(msgspec.Struct, frozen=True, kw_only=True):
    """An instance at one moment of a load."""

    at_s: float
    name: str
    role: str
    num_running: int = 0
    num_waiting: int = 0
    num_held_blocks: int = 0
    num_blocks: int = 0


class GapCounts:
    """Times between tokens, counted in 1 % wide buckets, so that millions take kilobytes."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, gap_s: float, num: int = 1) -> None:
        """Counts a time between two tokens `num` times, such as for each sequence of a step."""
        self._counts[_bucket(gap_s)] += num

    def add_line(self, first_s: float, growth_s: float, num_gaps: int, num: int = 1) -> None:
        """Counts `num_gaps` gaps, each `growth_s` longer than the one before; counts each gap `num` times."""
        while num_gaps:
            bucket, num_alike = _bucket(first_s), num_gaps
            while num_alike > 1 and _bucket(first_s + growth_s * (num_alike - 1)) != bucket:
                num_alike //= 2
            self._counts[bucket] += num_alike * num
            first_s, num_gaps = first_s + growth_s * num_alike, num_gaps - num_alike

    def percentile(self, percent: float) -> float | None:
        """Returns seconds, to within 0.5 %; None if nothing was counted."""
        remaining = math.ceil(len(self) * percent / 100)
        for bucket, num in sorted(self._counts.items()):
            remaining -= num
            if remaining <= 0:
                return float(LEAST_GAP_S * GAP_BUCKET ** (bucket + 0.5))
        return None


def _bucket(gap_s: float) -> int:
    return math.floor(math.log(max(gap_s, LEAST_GAP_S) / LEAST_GAP_S, GAP_BUCKET))


def goodput_per_s(outcomes: list[Outcome], slo: Slo, duration_s: float) -> float:
    """Returns the requests per second that met every goal."""
    return sum(map(slo.met_by, outcomes)) / duration_s if duration_s > 0 else 0.0
