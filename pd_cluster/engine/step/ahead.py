"""Launches one decode step ahead of the host: it takes its tokens from the device, and is read a step later.

Only for steps in which every sequence decodes and neither a guide nor a beam search decides what may follow. Random
numbers depend on seed and position, so the host knows them before the tokens; masks and penalties combine the last
token, which the device adds, with the earlier ones that the host knows (`model/sampling/adjust`). A sequence that turns
out to have ended, or is aborted, is computed once too often: that step writes to freed blocks, and their next holder
writes later in the device's order. New requests wait for the step that is under way. While requests wait that could not
be admitted anyway, for want of a place or of blocks, steps go on ahead of the host; if a sequence then ends unforeseen,
its successor is admitted one step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.model.sampling.sampler import Sampled
from pd_cluster.model.sampling.tokens import After, Tokens
from pd_cluster.types import Request, Status


class Launcher(Protocol):
    goes_ahead: bool  # whether there is a device that computes alongside the host

    def launch(self, requests: Sequence[Request], after: After | None = None) -> Tokens | None:
        """Launches a step of one token each; with `after`, of the token that follows the one being computed.

        Returns None, having done nothing, where the runner cannot proceed without the host.
        """


class LookAhead:
    def __init__(self, runner: Launcher, scheduler: StepScheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._plan: StepPlan | None = None  # of the step that is under way
        self._rows: dict[str, int] = {}  # row of its tokens by sequence
        self._tokens: Tokens | None = None
        self.num_ahead = 0  # steps that were launched early

    def plan(self) -> StepPlan | None:
        """Returns the step under way with its sequences that still run; None: there is none worth waiting for."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        if plan is None or not plan.chunks:
            self._tokens = None
            return None
        self._plan = plan
        return plan

    def sample(self, plan: StepPlan) -> list[Sampled] | None:
        """Returns the tokens of the plan's chunks; before it waits, it launches the next step if possible.

        Returns None, having done nothing, for a step that does not qualify.
        """
        if not self._runner.goes_ahead:
            return None
        requests = [request for request, _ in plan.chunks]
        if plan is self._plan:
            tokens, rows = self._tokens, [self._rows[request.key] for request in requests]
        else:
            tokens = self._runner.launch(requests) if can_go_ahead(plan) else None
            rows = list(range(len(requests)))
        self._plan = self._tokens = None
        if tokens is None:
            return None
        self._launch_next(requests, tokens, rows)
        chosen = tokens.wait()
        return [chosen[row] for row in rows]

    def _launch_next(self, requests: list[Request], tokens: Tokens, rows: list[int]) -> None:
        """Launches the next step, unless a request that waits for its turn could enter it: it would wait longer."""
        scheduler = self._scheduler
        if len(scheduler.running) != len(requests) or scheduler.could_admit():
            return
        going_on = [
            (request, row)
            for request, row in zip(requests, rows, strict=True)
            if len(request.output_token_ids) + 1 < request.sampling.max_tokens
        ]
        if scheduler.waiting and len(going_on) < len(requests):
            return  # the host knows that a place is about to be free
        if not going_on or not scheduler.grow_ahead([request for request, _ in going_on]):
            return
        members = [request for request, _ in going_on]
        launched = self._runner.launch(members, After(tokens, [row for _, row in going_on]))
        if launched is None:
            return
        self.num_ahead += 1
        self._plan, self._tokens = StepPlan([(request, 1) for request in members]), launched
        self._rows = {request.key: row for row, request in enumerate(members)}


def can_go_ahead(plan: StepPlan) -> bool:
    """Whether every sequence is decoded, and its next token follows from the logits, its tokens and a random number."""
    return all(
        num_tokens == 1
        and bool(request.output_token_ids)
        and request.num_behind == 1
        and request.leg != "prefill"
        and request.sampling.guide is None
        and not request.sampling.beam_width
        for request, num_tokens in plan.chunks
    )
