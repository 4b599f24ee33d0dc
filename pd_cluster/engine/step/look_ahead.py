"""Launches one step ahead of the host: a step takes its input tokens from the device, and is read a step later.

While the device computes a step, the host plans and launches the next one: sequences that decode, prompts in progress,
and requests that can be admitted. Only steps in which no request needs the host (`needs_host`) qualify. Random numbers
depend on seed and position, so the host knows them before the tokens. For masks and penalties the device adds the last
token to the earlier ones that the host knows (model/sampling/logit_adjustments.py).

A step counts as computed (blocks full, prefix cached, window passed) when the next one is planned, since the next step
reads and overwrites blocks later in the device's order. A sequence that turns out to have ended, or is aborted, is
computed once too often: that step writes to freed blocks, and their next holder writes later in the device's order.

Every step begins with `Begins`, whether the host planned it in time or ahead. A handover works in the same way in both
cases: when a step begins, all layers of the previous step have been launched, so a copy that is queued then runs after
these layers on the device.
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

It returns a function that receives the number of layers whose writes have been launched, or None if nobody needs it.
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
        """Launches a step. It returns one new token for each request whose last token the step computes, in order.

        `after` has the input tokens that only the device knows. `on_layer` receives the number of layers whose writes
        of keys and values have been launched.
        """


class LookAhead:
    def __init__(
        self,
        runner: Launcher,
        scheduler: StepScheduler,
        wants_host: Callable[[Sequence[Request]], bool] = lambda requests: False,
        is_processed: Callable[[Request], bool] | None = None,
    ) -> None:
        """`wants_host` returns whether the host should plan the next step, given the requests that chose a token.

        `is_processed` returns whether the host changes a request's logits; None: it never does.
        """
        self._runner, self._scheduler, self._wants_host = runner, scheduler, wants_host
        self._is_processed = is_processed
        self._plan: StepPlan | None = None  # the step under way
        self._rows: Mapping[Request, int] = {}  # request -> its row among the tokens of the step under way
        self._tokens: Tokens | None = None
        self.num_ahead = 0  # steps that were launched ahead

    def plan(self) -> StepPlan | None:
        """Returns the step under way, with the sequences that still run; None if no step is under way."""
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
        """Returns the requests whose last token is computed, and the next token of each.

        If possible, it launches the next step before it waits for these tokens.

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
        if needs_host(request) or (self._is_processed is not None and self._is_processed(request)):
            return False
        return self._runner.can_launch([request])


def _rows_of(plan: StepPlan) -> dict[Request, int]:
    """Returns the row of each request whose last token this step computes."""
    ready = [request for request, num_tokens in plan.chunks if num_tokens >= request.num_behind]
    return {request: row for row, request in enumerate(ready)}
