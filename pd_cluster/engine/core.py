"""The engine: requests in, tokens out, one step at a time. The role is data: nothing here knows P from D.

Synchronous, single-threaded; knows nothing of sockets or links. What happens to a request that must be handed over
is decided by the caller from the StepResult.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from pd_cluster.engine.scheduler import Scheduler, StepPlan
from pd_cluster.model.sampler import sample
from pd_cluster.types import Request, TokenOutput


class Runner(Protocol):
    """What the engine needs of a model; tests put a toy in its place."""

    eos_token_ids: frozenset[int]

    def forward(self, chunks: list[tuple[Request, int]]) -> torch.Tensor: ...


@dataclass(slots=True)
class StepResult:
    """`sampled` pairs each request that got a token with it; a finished request holds nothing any more."""

    plan: StepPlan
    sampled: list[tuple[Request, TokenOutput]] = field(default_factory=list)


class EngineCore:
    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.num_steps = 0

    def plan(self) -> StepPlan:
        return self.scheduler.plan()

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a plan: forward pass, sampling, bookkeeping. A request handed over keeps its blocks."""
        result = StepResult(plan)
        if not plan.chunks:
            return result
        logits = self.runner.forward(plan.chunks)  # [num_samples, vocab_size]
        ready = self.scheduler.computed(plan)
        token_ids = sample(logits, [r.sampling for r in ready], [len(r.output_token_ids) for r in ready])
        for request, token_id in zip(ready, token_ids, strict=True):
            result.sampled.append((request, self._commit(request, token_id)))
        self.num_steps += 1
        return result

    def step(self) -> StepResult:
        return self.run(self.plan())

    def _commit(self, request: Request, token_id: int) -> TokenOutput:
        request.output_token_ids.append(token_id)
        reason = request.finish_reason(self.runner.eos_token_ids)
        position = len(request.output_token_ids) - 1
        if reason is not None:
            self.scheduler.finish(request)
        elif request.leg == "prefill":
            self.scheduler.export(request)
        return TokenOutput(request.request_id, request.attempt, 0, position, token_id, reason)
