"""A runner without a model.

It determines how long steps take, and makes up tokens. Knows nothing of neighbours, of messages or of when steps begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_cluster.costs.linear_costs import Costs, StepWork
from pd_cluster.engine.scheduling.step_plan import Move
from pd_cluster.engine.step.drafting import Drafting
from pd_cluster.engine.step.step_timing import work_of
from pd_cluster.model.inputs.forward_batch import EncoderTotals, OnLayer, RunnerOutput
from pd_cluster.model.inputs.step_input import NO_DRAFTS, Drafts
from pd_cluster.model.sampling.device_tokens import After
from pd_cluster.model.sampling.sampler import Sampled
from pd_cluster.simulate.equal_steps import MADE_UP_TOKEN
from pd_cluster.types import Request, StateCopy

VOCAB_SIZE = 1 << 31
MADE_UP = Sampled(MADE_UP_TOKEN, None)

Chunks = Sequence[tuple[Request, int]]


class MadeUpTokens:
    """Implements model.sampling.tokens.Tokens."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def wait(self) -> list[Sampled]:
        return [MADE_UP] * self._num_rows


class HostPlans(Drafting):
    """Makes the host plan every step after the previous step's tokens are known. Adds no drafts."""

    def wants_host(self, requests: Sequence[Request]) -> bool:
        return True


class SimulatedRunner:
    """Implements engine_core.Runner. Calls `began` with each step's chunks and seconds before its outputs exist.

    Steps work as on a device: tokens come without logits, and so without tensors.
    """

    eos_token_ids: frozenset[int] = frozenset()
    vocab_size = VOCAB_SIZE
    goes_ahead = True
    encoded = EncoderTotals()

    def __init__(self, costs: Costs, began: Callable[[Chunks, float], None]) -> None:
        self._costs, self._began = costs, began

    def move(self, moves: Sequence[Move]) -> None:
        """Does nothing."""

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return True

    def launch(self, chunks: Chunks, after: After | None = None, on_layer: OnLayer | None = None) -> MadeUpTokens:
        """Launches a step. Ignores `on_layer`, because simulated_lanes.py computes what is sent during a step."""
        self._began(chunks, self.seconds(work_of(chunks, is_computed=False)))
        return MadeUpTokens(sum(num_tokens >= request.num_behind for request, num_tokens in chunks))

    def seconds(self, work: StepWork) -> float:
        return self._costs.step.seconds(work) + self._costs.host.step_s

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: OnLayer | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        raise AssertionError("a simulated step has no logits; its requests must not need the host")
