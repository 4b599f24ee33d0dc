"""Launches one step ahead of the host: a step takes its input tokens from the device, and is read a step later.

While the device computes a step, the host plans and launches the next one: sequences that decode, prompts in progress,
and requests that can be admitted. Only steps in which no request needs the host (`needs_host`) qualify. Random numbers
depend on seed and position, so the host knows them before the tokens. For masks and penalties the device adds the last
token to the earlier ones that the host knows (model/sampling/logit_adjustments.py).

A step counts as computed (blocks full, prefix cached, window passed) when the next one is planned, since the next step
reads and overwrites blocks later in the device's order. A sequence that turns out to have ended, or is aborted, is
computed once too often: that step writes to freed blocks, and their next holder writes later in the device's order.

Every step begins with `Begins`, whether the host planned it in time or ahead. A handover needs nothing more than in the
host's steps: launches follow one another, so when a step begins, all layers of the previous one are launched, and a
copy that is queued now waits for them on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan, ends_with, needs_host
from pd_cluster.model.inputs.forward_batch import OnLayer
from pd_cluster.model.sampling.device_tokens import After, Tokens
from pd_cluster.model.sampling.sampler import Sampled
from pd_cluster.types import Request, Status

Begins = Callable[[StepPlan], OnLayer | None]
"""Called once for each step, before it is launched; may remove chunks from the plan.

It returns a function that receives how many layers have their writes launched, or None if nobody needs it.
"""


def begin_quietly(plan: StepPlan) -> None:
    """Begins a step of an engine that hands nothing over."""


class Launcher(Protocol):
    goes_ahead: bool  # whether a device computes alongside the host

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """Whether the device can choose the tokens of these requests without the host."""

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> Tokens:
        """Launches a step; its tokens are those of the requests that catch up, in order.

        `after` has the tokens that chunks compute beyond those that the host knows. `on_layer` receives how many layers
        of the chunks' keys and values have their writes launched.
        """


class LookAhead:
    def __init__(
        self,
        runner: Launcher,
        scheduler: StepScheduler,
        wants_host: Callable[[Sequence[Request]], bool] = lambda requests: False,
    ) -> None:
        """`wants_host` returns whether the host should plan the step after one of these requests."""
        self._runner, self._scheduler, self._wants_host = runner, scheduler, wants_host
        self._plan: StepPlan | None = None  # of the step under way
        self._rows: Mapping[Request, int] = {}  # row of its tokens by request
        self._tokens: Tokens | None = None
        self.num_ahead = 0  # steps that were launched ahead

    def plan(self) -> StepPlan | None:
        """Returns the step under way, with its sequences that still run; None if there is none to wait for."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
            plan.admitted = [request for request in plan.admitted if request.status is Status.RUNNING]
        if plan is None or not plan.chunks:
            self._tokens = None
            return None
        self._plan = plan
        return plan

    def has_launched(self, plan: StepPlan) -> bool:
        """Whether this is the step under way."""
        return plan is self._plan

    def sample(
        self, plan: StepPlan, on_layer: OnLayer | None, begins: Begins
    ) -> tuple[list[Request], list[Sampled]] | None:
        """Returns the requests that caught up, and a token of each; if possible, launches the next step before it
        waits.

        The step is then recorded as computed. Returns None, without any effect, for a step that does not qualify.
        `on_layer` is for a step that is not under way yet, `begins` for the next one.
        """
        if not self._runner.goes_ahead or plan.drafts or plan.keeps:
            return None
        tokens, rows = self._tokens, self._rows
        if not self.has_launched(plan):
            tokens = None
            if all(self._may_go(request) for request, _ in plan.chunks):
                tokens, rows = self._runner.launch(plan.chunks, None, on_layer), _rows_of(plan)
        self._plan = self._tokens = None
        if tokens is None:
            return None
        ready = self._scheduler.computed(plan)
        self._launch_next(ready, tokens, rows, begins)
        chosen = tokens.wait()
        return ready, [chosen[rows[request]] for request in ready]

    def _launch_next(
        self, ready: Sequence[Request], tokens: Tokens, rows: Mapping[Request, int], begins: Begins
    ) -> None:
        if self._wants_host(ready):
            return
        plan = self._scheduler.plan_ahead([request for request in ready if ends_with(request)], self._may_go)
        if plan is None:
            return
        on_layer = begins(plan)
        if not plan.chunks:
            return
        sources = [rows[request] if request.num_behind == 0 else None for request, _ in plan.chunks]
        after = After(tokens, sources) if any(row is not None for row in sources) else None
        self.num_ahead += 1
        self._rows = _rows_of(plan)
        self._plan, self._tokens = plan, self._runner.launch(plan.chunks, after, on_layer)

    def _may_go(self, request: Request) -> bool:
        return not needs_host(request) and self._runner.can_launch([request])


def _rows_of(plan: StepPlan) -> dict[Request, int]:
    """Returns the row of each request that catches up with this step."""
    ready = [request for request, num_tokens in plan.chunks if num_tokens >= request.num_behind]
    return {request: row for row, request in enumerate(ready)}
