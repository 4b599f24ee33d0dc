"""Measures an engine's steps, to predict times for routing and to limit the chunks of long prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pd_cluster.costs.linear_costs import StepCost, StepWork, num_pairs_of
from pd_cluster.costs.online_fit import DECAY, MeanWork, OnlineFit
from pd_cluster.engine.scheduling.count_histogram import CountHistogram
from pd_cluster.types import Request
from pd_cluster.wire import STEP_TOKENS_BOUNDS

NUM_FIRST_STEPS = 20  # not measured after a start or wake-up: they allocate, compile and fill caches


def work_of(chunks: Sequence[tuple[Request, int]], is_computed: bool = True) -> StepWork:
    """Returns the work of a step, either after it was computed (`is_computed`) or before.

    A chunk of one token counts as a decode; longer chunks count as parts of prompts.
    """
    num_rows = num_context = num_prompt = num_pairs = 0
    for request, num_tokens in chunks:
        before = request.num_computed_tokens - num_tokens if is_computed else request.num_computed_tokens
        if num_tokens == 1:
            num_rows += 1
            num_context += before + 1
        else:
            num_prompt += num_tokens
            num_pairs += num_pairs_of(num_tokens, before)
    return StepWork(num_rows, num_context, num_prompt, num_pairs)


class StepTiming:
    """Fits the costs of steps and keeps their mean work. Recent steps weigh most. `clock`: measures the steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.step_tokens = CountHistogram(STEP_TOKENS_BOUNDS)
        self._fit, self._prompt_work, self._decode_work = OnlineFit(), MeanWork(), MeanWork()
        self._num_rows = self._num_tokens = 0.0
        self._num_left_out = NUM_FIRST_STEPS

    def start_over(self) -> None:
        """Ignores the next steps, because the engine has just started or woken up."""
        self._num_left_out = NUM_FIRST_STEPS

    def computed(self, work: StepWork, took_s: float, num_sampled: int) -> None:
        """Records a step that sampled `num_sampled` tokens."""
        if not (num_tokens := work.num_rows + work.num_prompt_tokens):
            return
        self.step_tokens.add(num_tokens)
        if work.num_rows and not work.num_prompt_tokens:
            self._num_rows = DECAY * self._num_rows + work.num_rows
            self._num_tokens = DECAY * self._num_tokens + num_sampled
        if self._num_left_out:
            self._num_left_out -= 1
            return
        self._fit.add(work, took_s)
        if work.num_prompt_tokens:
            self._prompt_work.add(work)
        if work.num_rows:
            self._decode_work.add(work)

    @property
    def cost(self) -> StepCost:
        return self._fit.cost

    @property
    def prompt_work(self) -> StepWork:
        """Returns the mean work of recent steps that computed prompts."""
        return self._prompt_work.work

    @property
    def decode_work(self) -> StepWork:
        """Returns the mean work of recent steps that decoded."""
        return self._decode_work.work

    @property
    def decode_step_s(self) -> float:
        return self.cost.seconds(self.decode_work)

    @property
    def tokens_per_step(self) -> float:
        """Returns how many tokens a decoding sequence gets per step; with drafts, more than one."""
        return max(1.0, self._num_tokens / self._num_rows) if self._num_rows else 1.0
