"""Derives figures of the last minutes' requests, one sample a second, from counters that only grow.

A sample's rates cover its second; its percentiles cover the WINDOW_S seconds that end with it, because a small cluster
produces few tokens in a second. Percentiles are interpolated within a bucket, as Prometheus does. Knows nothing of
instances or HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_cluster.cluster.records.request_stats import BOUNDS, COUNTERS
from pd_cluster.process_messages import Stats

NUM_SAMPLES = 600
WINDOW_S = 10.0
PERCENTS = (50, 99)
RATES = {
    "tokens_per_s": ("generation_tokens",),
    "prompt_tokens_per_s": ("prompt_tokens",),
    "cached_tokens_per_s": ("prompt_tokens_cached",),
    "finished_per_s": tuple(
        name for name in COUNTERS if name.startswith("finished_") and name not in ("finished_error", "finished_abort")
    ),
    "failed_per_s": ("finished_error",),
    "aborted_per_s": ("finished_abort",),
    "replayed_per_s": tuple(name for name in COUNTERS if name.startswith("replays_")),
    "refused_per_s": tuple(name for name in COUNTERS if name.startswith("refused_")),
}
DURATIONS = {"ttft": "first_token_s", "tpot": "token_s", "itl": "inter_token_s"}


@dataclass(frozen=True, slots=True)
class _Reading:
    """All counters at one moment. `at_s`: Unix time; `clock_s`: a clock that never steps."""

    at_s: float
    clock_s: float
    totals: dict[str, int]  # by the names of RATES
    counts: dict[str, list[int]]  # buckets by the names of DURATIONS
    num_running: int
    num_queued: int


class RequestHistory:
    """Keeps the last readings; `samples` are their differences, each computed once for all readers."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._readings: deque[_Reading] = deque(maxlen=num_samples + 1)
        self._samples: deque[dict[str, Any]] = deque(maxlen=num_samples)

    def note(self, at_s: float, clock_s: float, stats: Stats, num_running: int, num_queued: int) -> None:
        """Adds a reading. `num_running` requests are being answered, `num_queued` wait to be routed."""
        totals = {rate: sum(stats.counters.get(name, 0) for name in names) for rate, names in RATES.items()}
        counts = {
            name: list(stats.histograms[source].counts) if source in stats.histograms else [0] * _num_buckets(source)
            for name, source in DURATIONS.items()
        }
        now = _Reading(at_s, clock_s, totals, counts, num_running, num_queued)
        if self._readings:
            self._samples.append(self._sample(now))
        self._readings.append(now)

    def samples(self, since_s: float = float("-inf")) -> list[dict[str, Any]]:
        """Returns the samples after `since_s` (Unix time), oldest first; durations in seconds, None for a missing
        value.
        """
        return [sample for sample in self._samples if sample["at_s"] > since_s]

    def last_sample(self) -> dict[str, Any] | None:
        return self._samples[-1] if self._samples else None

    def total(self, rate: str, last_s: float) -> int:
        """Returns how much the counter of this rate, a name in RATES, has grown in the last `last_s` seconds."""
        if not self._readings:
            return 0
        last = self._readings[-1]
        first = next(each for each in self._readings if each.clock_s >= last.clock_s - last_s)
        return last.totals[rate] - first.totals[rate]

    def _sample(self, now: _Reading) -> dict[str, Any]:
        """Returns the sample that results from a new reading and the earlier ones."""
        before = start = self._readings[-1]
        passed_s = max(now.clock_s - before.clock_s, 1e-3)
        for start in reversed(self._readings):
            if now.clock_s - start.clock_s >= WINDOW_S:
                break
        sample: dict[str, Any] = {
            "at_s": round(now.at_s, 3),
            "num_running": now.num_running,
            "num_queued": now.num_queued,
        }
        for rate, total in now.totals.items():
            sample[rate] = round((total - before.totals[rate]) / passed_s, 2)
        for name, source in DURATIONS.items():
            earlier = start.counts[name]
            counts = [many - few for many, few in zip(now.counts[name], earlier, strict=True)]
            for percent in PERCENTS:
                sample[f"{name}_p{percent}_s"] = quantile(BOUNDS[source], counts, percent / 100)
        return sample


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Returns a quantile, interpolated within its bucket; the last bound if the quantile is above it; None without
    values.

    `counts` has one more bucket than `bounds`, for values above all of them.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for at, count in enumerate(counts[:-1]):
        if below + count >= wanted and count:
            low = bounds[at - 1] if at else 0.0
            return round(low + (bounds[at] - low) * (wanted - below) / count, 6)
        below += count
    return bounds[-1]


def _num_buckets(source: str) -> int:
    return len(BOUNDS[source]) + 1
