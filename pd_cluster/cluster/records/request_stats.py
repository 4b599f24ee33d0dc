"""Counts a process's requests since it started: their tokens, ends and durations.

A histogram is a list of counts, so a token costs only a search among some twenty bounds and two additions, without
locks or labels. Names and texts for Prometheus are in api/admin/metric_tables.py. Knows nothing of routing, HTTP or
Prometheus.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pd_cluster.cluster.roles.auto_role import Decision, Flip, Held, Needy
from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts
from pd_cluster.process_messages import Buckets, Stats
from pd_cluster.types import FinishReason

ReplayCause = Literal["death", "fault", "moved", "full"]
Refusal = Literal["slo", "queue", "unavailable"]
Bounds = tuple[float, ...]

# Upper bounds of buckets: vLLM's, because dashboards refer to them, and smaller ones, because percentiles within the
# first bucket would be guesses. HANDOVER_S and the bounds of token counts are not vLLM's.
HANDOVER_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
FIRST_TOKEN_S: Bounds = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S: Bounds = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S: Bounds = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
NUM_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))[:-2]  # to a million
NUM_SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)

BOUNDS: dict[str, Bounds] = {
    "first_token_s": FIRST_TOKEN_S,
    "inter_token_s": INTER_TOKEN_S,
    "whole_s": REQUEST_S,
    "queue_s": REQUEST_S,
    "prefill_s": REQUEST_S,
    "decode_s": REQUEST_S,
    "inference_s": REQUEST_S,
    "handover_s": HANDOVER_S,
    "media_fetch_s": HANDOVER_S,
    "media_decode_s": HANDOVER_S,
    "token_s": INTER_TOKEN_S,
    "num_prompt_tokens": NUM_TOKENS,
    "num_computed_tokens": NUM_TOKENS,
    "num_output_tokens": NUM_TOKENS,
    "most_output_tokens": NUM_TOKENS,
    "max_tokens": NUM_TOKENS,
    "num_sequences": NUM_SEQUENCES,
}
COUNTERS = (
    *("arrived_requests", "arrived_prompt_tokens", "arrived_prompt_pairs", "arrived_answers", "arrived_max_tokens"),
    *(f"role_changes_{role}" for role in get_args(Needy)),
    *(f"roles_kept_{why}" for why in get_args(Held)),
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_computed",
    "generation_tokens",
    *(f"finished_{reason}" for reason in get_args(FinishReason)),
    *(f"replays_{cause}" for cause in get_args(ReplayCause)),
    *(f"refused_{why}" for why in get_args(Refusal)),
    *("images_read", "images_refused", "videos_read", "videos_refused", "kept_media_hits", "kept_media_queries"),
)


class Histogram:
    """Counts values by bucket. A value belongs to the first bucket whose bound it does not exceed; the last bucket has
    no bound.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that has ended. `reasons` and `num_output_tokens` have one item for each sequence; all times are by one
    clock.

    `max_tokens` 0: a pooling request, whose vector came at `first_token_s` and `last_token_s`.
    """

    reasons: list[FinishReason]
    num_output_tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    received_s: float
    first_token_s: float
    last_token_s: float
    admitted_s: float | None = None  # when a prefill instance had room for the prompt; None: not reported
    handovers_s: list[float] = field(default_factory=list)  # duration of each
    num_cached_tokens: int | None = None  # of the prompt; None: not reported


class RequestStats:
    """Runs on the event loop. The code that delivers tokens updates `num_generation_tokens` and `inter_token_s`
    directly.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.tenants = TenantCounts()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self.inter_token_s = self._histograms["inter_token_s"]

    def arrived(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """Counts a request when it arrives, before it waits."""
        counters = self._counters
        counters["arrived_requests"] += 1
        counters["arrived_prompt_tokens"] += num_prompt_tokens
        counters["arrived_prompt_pairs"] += num_prompt_tokens * (num_prompt_tokens - 1) // 2
        counters["arrived_answers"] += num_answers
        counters["arrived_max_tokens"] += num_answers * max_tokens

    def considered_roles(self, decision: Decision | None, flip: Flip | None) -> None:
        """Counts a decision of --auto-role: the change that it made, or why it made none."""
        if flip is not None:
            self._counters[f"role_changes_{flip.role}"] += 1
        elif decision is not None and decision.needy is None:
            self._counters[f"roles_kept_{decision.verdict}"] += 1

    def refused(self, why: Refusal) -> None:
        self._counters[f"refused_{why}"] += 1

    def medium(self, kind: str, is_read: bool) -> None:
        """Counts an image or video of a prompt; a repeated one in the same prompt counts once."""
        self._counters[f"{kind}s_{'read' if is_read else 'refused'}"] += 1

    def kept_medium(self, is_found: bool) -> None:
        """Counts a look-up of an image or video in the cache."""
        self._counters["kept_media_queries"] += 1
        self._counters["kept_media_hits"] += is_found

    def read_medium(self, fetch_s: float, decode_s: float) -> None:
        """Counts the times of an image or video that a child process decoded."""
        self._histograms["media_fetch_s"].observe(fetch_s)
        self._histograms["media_decode_s"].observe(decode_s)

    def replayed(self, cause: ReplayCause) -> None:
        self._counters[f"replays_{cause}"] += 1

    def first_token(self, num_prompt_tokens: int, after_s: float) -> None:
        """Counts a request's first token: its prompt has been computed."""
        self.num_prompt_tokens += num_prompt_tokens
        self._histograms["first_token_s"].observe(after_s)

    def prompted(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts the sources of a prompt's KV cache."""
        self._counters["prompt_tokens_cached"] += num_cached_tokens
        self._counters["prompt_tokens_computed"] += num_prompt_tokens - num_cached_tokens

    def pooled(self, num_prompt_tokens: int) -> None:
        """Counts a prompt that became a vector."""
        self.num_prompt_tokens += num_prompt_tokens

    def ended(self, outcome: Outcome) -> None:
        """Counts every sequence by its reason; the request's measures count only if all sequences completed."""
        for reason in outcome.reasons:
            self._counters[f"finished_{reason}"] += 1
        for took_s in outcome.handovers_s:
            self._histograms["handover_s"].observe(took_s)
        if {"abort", "error"} & {*outcome.reasons}:
            return
        for num_tokens in outcome.num_output_tokens if outcome.max_tokens else ():
            self._histograms["num_output_tokens"].observe(num_tokens)
        for name, value in _measures(outcome).items():
            self._histograms[name].observe(value)

    def snapshot(self) -> Stats:
        self._counters["prompt_tokens"] = self.num_prompt_tokens
        self._counters["generation_tokens"] = self.num_generation_tokens
        buckets = {name: Buckets(list(h.counts), round(h.total * 1e6)) for name, h in self._histograms.items()}
        return Stats({**self._counters, **self.tenants.counters()}, buckets)


def _measures(outcome: Outcome) -> dict[str, float]:
    """Returns histogram -> value; omits values that depend on an event that was not reported."""
    measures: dict[str, float] = {
        "num_prompt_tokens": outcome.num_prompt_tokens,
        "whole_s": outcome.last_token_s - outcome.received_s,
    }
    if outcome.max_tokens:
        measures |= {
            "most_output_tokens": max(outcome.num_output_tokens),
            "max_tokens": outcome.max_tokens,
            "num_sequences": len(outcome.reasons),
            "decode_s": outcome.last_token_s - outcome.first_token_s,
        }
        if (most := max(outcome.num_output_tokens)) > 1:
            measures["token_s"] = (outcome.last_token_s - outcome.first_token_s) / (most - 1)
    if outcome.num_cached_tokens is not None:
        measures["num_computed_tokens"] = outcome.num_prompt_tokens - outcome.num_cached_tokens
    if outcome.admitted_s is not None:  # by another clock, with an error of a message's travel time: clamped
        admitted_s = min(max(outcome.admitted_s, outcome.received_s), outcome.first_token_s)
        measures["queue_s"] = admitted_s - outcome.received_s
        measures["prefill_s"] = outcome.first_token_s - admitted_s
        measures["inference_s"] = outcome.last_token_s - admitted_s
    return measures


def added(parts: Iterable[Stats]) -> Stats:
    """Adds up all parts; where a part lacks a name, 0 is added."""
    counters: dict[str, int] = {}
    buckets: dict[str, Buckets] = {}
    for part in parts:
        for name, number in part.counters.items():
            counters[name] = counters.get(name, 0) + number
        for name, each in part.histograms.items():
            known = buckets.get(name)
            buckets[name] = each if known is None else _sum(known, each)
    return Stats(counters, buckets)


def _sum(one: Buckets, other: Buckets) -> Buckets:
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return Buckets(counts, one.total_e6 + other.total_e6)
