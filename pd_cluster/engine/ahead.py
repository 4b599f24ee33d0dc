"""One decode step more than the host knows the tokens of: it is launched from the device's own, and read a step later.

Only for steps in which every sequence is decoded, and neither a guide nor a beam search decides what may follow: random
numbers follow from seed and position, so the host knows them ahead of the tokens, and what masks and penalties must
know of the last token the device adds to what the host knows of those before (`model/adjust`). A sequence that
turns out to have ended, or is aborted, is computed once too often: what that wrote is in blocks that have come home,
and whoever takes them next writes after it, in the device's order. Who arrives waits for the step that is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.engine.plan import StepPlan
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.model.sampler import Sampled
from pd_cluster.model.tokens import After, Tokens
from pd_cluster.types import Request, Status


class Launcher(Protocol):
    goes_ahead: bool  # whether there is a device that computes beside the host

    def launch(self, requests: Sequence[Request], after: After | None = None) -> Tokens | None:
        """A step of one token for each; with `after` of the token that follows the one which is computed now.

        None, and nothing was done, where the runner cannot do without the host.
        """


class LookAhead:
    def __init__(self, runner: Launcher, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._plan: StepPlan | None = None  # of the step that is under way
        self._rows: dict[str, int] = {}  # of its tokens, by sequence
        self._tokens: Tokens | None = None
        self.num_ahead = 0  # steps that were launched early

    def plan(self) -> StepPlan | None:
        """The step that is under way, as far as its sequences still run; None: there is none worth waiting for."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        if plan is None or not plan.chunks:
            self._tokens = None
            return None
        self._plan = plan
        return plan

    def sample(self, plan: StepPlan) -> list[Sampled] | None:
        """The tokens of the plan's chunks; launches the step after it, if there may be one, before it waits.

        None: this step is not for here, and nothing was done.
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
        """Not when others wait for their turn: they would wait longer."""
        scheduler = self._scheduler
        if scheduler.waiting or len(scheduler.running) != len(requests):
            return
        going_on = [
            (request, row)
            for request, row in zip(requests, rows, strict=True)
            if len(request.output_token_ids) + 1 < request.sampling.max_tokens
        ]
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
