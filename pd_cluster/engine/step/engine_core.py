"""The engine: turns requests into tokens or vectors, one step at a time.

No code here distinguishes P from D: the role is data. The engine is synchronous and single-threaded, and knows nothing
of sockets or links. The caller hands over the requests that a StepResult lists for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import Move, StepPlan
from pd_cluster.engine.step.commit import Commit, StepResult
from pd_cluster.engine.step.draft_acceptance import Acceptance, DraftRows, StepMasks, draft_rows
from pd_cluster.engine.step.drafting import Drafting
from pd_cluster.engine.step.look_ahead import Begins, LookAhead, begin_quietly
from pd_cluster.engine.step.pooler import Pooler, logits_of
from pd_cluster.engine.step.step_outputs import NextToken, PooledVector, RowOutput
from pd_cluster.engine.step.step_timing import StepTiming
from pd_cluster.model.inputs.forward_batch import EncoderTotals, OnLayer, RunnerOutput
from pd_cluster.model.inputs.step_input import NO_DRAFTS, Drafts
from pd_cluster.model.sampling.device_tokens import After, Tokens
from pd_cluster.model.sampling.grammar_masks import Guides, no_guides
from pd_cluster.model.sampling.request_processors import NO_PROCESSORS, RequestProcessors
from pd_cluster.model.sampling.sampler import Sampled, Sampler, SamplingRow
from pd_cluster.types import Candidate, Request, StateCopy, Status

MEASURED_TOKENS = 64  # steps with at least this many tokens measure how fast prompts are computed


class Runner(Protocol):
    """The part of a model runner that the engine needs. Tests substitute a toy."""

    eos_token_ids: frozenset[int]
    vocab_size: int
    goes_ahead: bool

    @property
    def encoded(self) -> EncoderTotals:
        """The work that the vision tower has done so far, if there is a tower."""

    def move(self, moves: Sequence[Move]) -> None:
        """Copies blocks in the given order."""

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """See look_ahead.Launcher."""

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> Tokens:
        """See look_ahead.Launcher."""

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: OnLayer | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        """Returns logits of a chunk's last `num_logit_rows` tokens, and hidden states of its last `num_hidden_rows`.

        The chunks' rows are in order. The logits of all drafts follow, in the order of their chunks. During the pass,
        the runner calls `on_layer` with the number of layers whose KV of these chunks is already in the pool.
        """


@dataclass(slots=True)
class StepTimes:
    """Seconds since the start, by activity."""

    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        scheduler: StepScheduler,
        timing: StepTiming | None = None,
        guides: Guides | None = None,
        drafting: Drafting | None = None,
        processors: RequestProcessors = NO_PROCESSORS,
    ) -> None:
        """`drafting` None: each sequence gets one token per step.

        `timing` is the object that the scheduler's `cost` reads.
        """
        self.timing = timing or StepTiming()
        self.runner = runner
        self.guides = guides or no_guides()
        self.scheduler = scheduler
        self.drafting = drafting or Drafting(scheduler, ())
        self.sampler = Sampler(runner.vocab_size, runner.eos_token_ids, processors)
        self._commit = Commit(scheduler, runner.eos_token_ids)
        self._acceptance = Acceptance(self.sampler, scheduler, self._commit)
        self.times = StepTimes()
        self.num_steps = 0
        self._ahead_s: float | None = None  # when the last step ended, if it was launched ahead
        self.after_moves: list[Callable[[], None]] = []  # called after every copy of blocks
        self.ahead = LookAhead(runner, scheduler, self.drafting.wants_host, processors.concern if processors else None)
        self.pooler = Pooler()
        self._clock = self.timing.clock
        scheduler.move_now = self._move

    def _move(self, moves: Sequence[Move]) -> None:
        """Moves blocks, and measures how long loading blocks from host memory takes."""
        start_s = self._clock()
        self.runner.move(moves)
        if (tier := self.scheduler.blocks.tier) is not None and any(move.kind == "in" for move in moves):
            tier.cost.loaded(len(moves), self._clock() - start_s)  # storing a block takes as long as loading it
        for each in self.after_moves:
            each()

    def plan(self) -> StepPlan:
        start_s = self._clock()
        plan = self.ahead.plan()
        if plan is None:
            plan = self.scheduler.plan()
            plan.chunks = self.guides.without_unready(plan.chunks)
            self.drafting.add_to(plan, self._clock)
        self.times.plan_s += self._clock() - start_s
        return plan

    def run(self, plan: StepPlan, begins: Begins = begin_quietly) -> StepResult:
        """Computes a plan: forward pass, sampling, bookkeeping. Requests to hand over keep their blocks."""
        result = StepResult(plan)
        on_layer = None if self.ahead.has_launched(plan) else begins(plan)
        times, start_s = self.times, self._clock()
        if plan.moves:
            self._move(plan.moves)
        if not plan.chunks:
            self.scheduler.computed(plan)  # the plan's sequences are gone, so only its blocks for states must be freed
            return result
        if (chosen := self.ahead.sample(plan, on_layer, begins)) is not None:
            sampled_s = self._clock()
            times.forward_s += sampled_s - start_s
            ready, sampled = chosen
            rows = [SamplingRow(request, request.index, len(request.output_token_ids)) for request in ready]
            self._commit.step(result, ready, _outputs(rows, sampled), {})
            ended_s = self._clock()
            times.commit_s += ended_s - sampled_s
            if self._ahead_s is not None and plan.num_tokens == len(plan.chunks):
                self.drafting.size.costs_ahead.took(plan.num_tokens, ended_s - self._ahead_s)
            self._ahead_s = ended_s
        else:
            self._ahead_s = None
            self._compute(result, on_layer)
        self.num_steps += 1
        self.drafting.ended(request for request, _ in result.sampled if request.status is Status.FINISHED)
        return result

    def _compute(self, result: StepResult, on_layer: OnLayer | None) -> None:
        """Computes a plan that cannot be launched ahead."""
        plan, times = result.plan, self.times
        begun_s = self._clock()
        guided = self.guides.begin(plan.chunks, plan.drafts)  # masks are built while the model runs
        output = self.runner.forward(plan.chunks, on_layer, plan.drafts, plan.kept())
        computed_s = self._clock()
        times.forward_s += computed_s - begun_s
        if (tier := self.scheduler.blocks.tier) is not None and plan.num_tokens >= MEASURED_TOKENS:
            tier.computed(plan.num_tokens, computed_s - begun_s)
        logits = output.logits
        if any(request.wants_prompt_logprobs for request, _ in plan.chunks):
            logits = self._prompt_logprobs(plan, logits)
        pooled = self.pooler.pool(plan.chunks, output.hidden_states.numpy())
        ready = self.scheduler.computed(plan)
        sampling = ready
        if any(request.pooling is not None for request in ready):
            logits, sampling = _without_pooled(logits, ready, pooled)
        candidates, failed = self._candidates(logits, sampling)
        masks, drafts = guided.wait(), draft_rows(plan, len(sampling))
        outputs, known = self._sample(logits, sampling, masks, drafts)
        outputs.update(failed)
        outputs.update((request, [vector]) for request, vector in pooled.items())
        sampled_s = self._clock()
        times.sample_s += sampled_s - computed_s
        self._commit.step(result, ready, outputs, candidates)
        accepted = self._acceptance.accept(result, drafts, logits, known, masks)
        ended_s = self._clock()
        times.commit_s += ended_s - sampled_s
        self.drafting.verified(plan, accepted, ended_s - begun_s)

    def step(self, begins: Begins = begin_quietly) -> StepResult:
        return self.run(self.plan(), begins)

    def _sample(
        self, logits: torch.Tensor, ready: list[Request], masks: StepMasks, drafts: Sequence[DraftRows]
    ) -> tuple[dict[Request, list[RowOutput]], dict[Request, list[Sampled]]]:
        """Returns the next tokens by request, one for each of its sequences.

        Each request in `ready` has one row of logits. A beam search gets no tokens, because it chooses among
        candidates. The second result has the tokens after drafts that could be drawn at once.
        """
        rows = [
            SamplingRow(r, index, len(r.output_token_ids), masks[r.key][0] if r.key in masks else None)
            for r in ready
            for index in _indices(r)
        ]
        at = [i for i, request in enumerate(ready) for _ in _indices(request)]
        early = [pair for each in drafts for pair in each.at_once()]
        at += [row for _, row in early]
        if not at:
            return {}, {}
        is_whole = at == list(range(len(logits)))
        sampled = self.sampler.sample(logits, [*rows, *(row for row, _ in early)], None if is_whole else at)
        known: dict[Request, list[Sampled]] = {}
        for (row, _), each in zip(early, sampled[len(rows) :], strict=True):
            known.setdefault(row.request, []).append(each)
        return _outputs(rows, sampled[: len(rows)]), known

    # ---- beam search

    def _candidates(
        self, logits: torch.Tensor, ready: list[Request]
    ) -> tuple[dict[str, list[Candidate]], dict[Request, list[RowOutput]]]:
        """Returns the possible continuations by beam, and the outputs of beams that have no continuation."""
        found: dict[str, list[Candidate]] = {}
        failed: dict[Request, list[RowOutput]] = {}
        at = [i for i, request in enumerate(ready) if request.sampling.beam_width]
        rows = [SamplingRow(ready[i], ready[i].index, len(ready[i].output_token_ids)) for i in at]
        for row, each in zip(rows, self.sampler.candidates(logits, rows, at) if at else (), strict=True):
            if isinstance(each, Sampled):
                failed[row.request] = [NextToken(row, each)]
            else:
                found[row.request.key] = each
        return found, failed

    # ---- outputs of a prompt

    def _prompt_logprobs(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        """Records the logprobs of this step's prompt tokens.

        Returns the logits to sample from, including the drafts' rows.
        """
        at, kept = 0, []
        for request, num_tokens in plan.chunks:
            num_rows = request.num_logit_rows(num_tokens)
            if num_rows and num_tokens == request.num_behind:
                kept.append(at + num_rows - 1)
            if request.wants_prompt_logprobs:
                self._note_prompt_logprobs(request, logits[at : at + num_rows])
            at += num_rows
        return logits[[*kept, *range(at, len(logits))]]

    def _note_prompt_logprobs(self, request: Request, logits: torch.Tensor) -> None:
        """Records log-probabilities.

        Row i has the logits after token num_computed_tokens + i, which predict the next token.
        """
        start, known = request.num_computed_tokens, request.prompt_logprobs
        if not known:
            known.append(None)  # nothing precedes the first token
        first = len(known) - 1 - start  # after a preemption tokens are computed again, but recorded only once
        targets = request.prompt_token_ids[len(known) : start + 1 + len(logits)]
        wanted = request.sampling.prompt_logprobs or 0
        if first >= 0 and targets:
            done = len(known) - 1
            named = request.sampling.prompt_logprob_token_ids[done : done + len(targets)]
            known += self.sampler.prompt_logprobs(logits[first : first + len(targets)], targets, wanted, named)


def _without_pooled(
    logits: torch.Tensor, ready: list[Request], pooled: dict[Request, PooledVector]
) -> tuple[torch.Tensor, list[Request]]:
    """Adds the vectors of requests that pool logits.

    Returns the other rows of logits, which are sampled, and the requests that choose a token. The rows of these
    requests come first, then those of drafts.
    """
    kept: list[int] = []
    sampling: list[Request] = []
    at = 0
    for request in ready:
        if (pooling := request.pooling) is None:
            kept.append(at)
            sampling.append(request)
        elif pooling.kind == "logits":
            pooled[request] = logits_of(pooling, logits[at])
        else:
            continue
        at += 1
    return (logits if len(kept) == at else logits[[*kept, *range(at, len(logits))]]), sampling


def _outputs(rows: list[SamplingRow], sampled: list[Sampled]) -> dict[Request, list[RowOutput]]:
    """Returns the tokens by request, one for each row."""
    outputs: dict[Request, list[RowOutput]] = {}
    for row, each in zip(rows, sampled, strict=True):
        outputs.setdefault(row.request, []).append(NextToken(row, each))
    return outputs


def _indices(request: Request) -> range:
    """Returns the indices of the sequences that get their next token from a request's row of logits.

    After the prompt these are all its sequences. A beam search has none, because it chooses among candidates.
    """
    if request.sampling.beam_width:
        return range(0)
    is_first = request.sampling.n > 1 and request.index == 0 and not request.output_token_ids
    is_first = is_first and not request.is_resumed
    return range(request.sampling.n) if is_first else range(request.index, request.index + 1)
