"""Launches steps ahead: while the device computes a step, the host plans and launches the next one.

The next step may have sequences that decode, prompts in progress, and requests that can be admitted. That step takes
tokens that the host does not know yet directly from the device. The host reads the tokens of a step only after it has
launched the next step. Only steps in which no request needs the host (`needs_host`) qualify. Random numbers depend on
seed and position, so the host knows them before the tokens. For masks and penalties, the device adds the last token to
the earlier ones that the host knows (model/sampling/logit_adjustments.py).

When the next step is planned, the running one already counts as computed (blocks full, prefix cached, window passed).
This is safe because the device executes the next step's reads and writes later. A sequence that turns out to have
ended, or is aborted, is computed one step too long. The extra step writes to freed blocks, but the device executes the
writes of the blocks' next holder later.

Every step begins with a call of `Begins`, whether or not it is launched ahead. When a step begins, all layers of the
previous step have been launched, so a copy that a handover queues then runs on the device after these layers.
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

It returns a function that receives the number of layers whose writes have been launched, or None if that number is not
needed.
"""


def begin_quietly(plan: StepPlan) -> None:
    """The `Begins` of an engine that hands nothing over."""


class Launcher(Protocol):
    goes_ahead: bool  # whether the device computes while the host goes on

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """Whether the device can choose the tokens of these requests without the host."""

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> Tokens:
        """Launches a step. Returns one new token for each request whose last token the step computes, in order.

        `after` has the input tokens that only the device knows. `on_layer` receives the number of layers whose KV
        writes have been launched.
        """


class LookAhead:
    def __init__(
        self,
        runner: Launcher,
        scheduler: StepScheduler,
        wants_host: Callable[[Sequence[Request]], bool] = lambda requests: False,
        is_processed: Callable[[Request], bool] | None = None,
    ) -> None:
        """`wants_host`, given the requests that chose a token, returns whether the host should plan the next step.

        `is_processed` returns whether the host changes a request's logits; None: the host changes no logits.
        """
        self._runner, self._scheduler, self._wants_host = runner, scheduler, wants_host
        self._is_processed = is_processed
        self._plan: StepPlan | None = None  # the step that was launched ahead
        self._rows: Mapping[Request, int] = {}  # request -> its row among that step's tokens
        self._tokens: Tokens | None = None
        self.num_ahead = 0  # steps that were launched ahead

    def plan(self) -> StepPlan | None:
        """Returns the step that was launched ahead, with only the sequences that still run; None if there is none."""
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
        """Whether this step was launched ahead."""
        return plan is self._plan

    def sample(
        self, plan: StepPlan, on_layer: OnLayer | None, begins: Begins
    ) -> tuple[list[Request], list[Sampled]] | None:
        """Returns the requests whose last token is computed, and the next token of each.

        Records the step as computed, and launches the next step, if possible, before it waits for these tokens. For a
        step that does not qualify, does nothing and returns None. `on_layer` is for this step, if it is not launched
        yet; `begins` is for the next one.
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
    """Maps each request whose last token this step computes to its row."""
    ready = [request for request, num_tokens in plan.chunks if num_tokens >= request.num_behind]
    return {request: row for row, request in enumerate(ready)}
