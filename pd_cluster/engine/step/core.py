"""The engine: requests in, tokens or vectors out, one step at a time.

The role is data: no code here distinguishes P from D. Synchronous, single-threaded; knows nothing of sockets or links.
The caller decides from the StepResult what happens to a request that must be handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pd_cluster.engine.step import beam_groups
from pd_cluster.engine.step.ahead import Begins, LookAhead, begin_quietly
from pd_cluster.engine.step.beams import BeamSearch, answer, first_tokens_of
from pd_cluster.engine.step.outputs import NextTokens, PooledVector, RowOutput
from pd_cluster.engine.step.plan import Move, StepPlan
from pd_cluster.engine.step.pooler import Pooler, logits_of
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.model.batch import Encoded, OnLayer, RunnerOutput
from pd_cluster.model.sampling.guided import Guides, Masks, no_guides
from pd_cluster.model.sampling.sampler import Sampled, Sampler, SamplingRow
from pd_cluster.model.sampling.tokens import After, Tokens
from pd_cluster.types import Candidate, PooledOutput, PromptOutput, Request, TokenOutput

MEASURED_TOKENS = 64  # in a step that tells how quickly prompts are computed


class Runner(Protocol):
    """The part of a model that the engine needs; tests substitute a toy."""

    eos_token_ids: frozenset[int]
    vocab_size: int
    goes_ahead: bool

    @property
    def encoded(self) -> Encoded:
        """The work of the vision tower, if there is one."""

    def move(self, moves: Sequence[Move]) -> None:
        """Copies blocks in the given order."""

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """See ahead.Launcher."""

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> Tokens:
        """See ahead.Launcher."""

    def forward(self, chunks: list[tuple[Request, int]], on_layer: OnLayer | None = None) -> RunnerOutput:
        """Returns logits and hidden states: of each chunk in turn, its last `num_logit_rows` and `num_hidden_rows`.

        `on_layer` receives how many layers of the chunks' KV are in the pool, as often as the runner can tell.
        """


@dataclass(slots=True)
class StepTimes:
    """Seconds since the start, by activity."""

    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0


@dataclass(slots=True)
class StepResult:
    """`sampled` pairs each sequence that got a token with it, once for each; a finished one no longer holds anything.

    A prompt that is handed over is paired with the first tokens of all its sequences. `prompts` come once per request.
    A beam search returns nothing before its end, and then every token of its answer, paired with any of its beams;
    `candidates` are for the instance that takes it over, `ended` are beams that were dropped. `failed` pairs each
    sequence that can have no output with the reason; it no longer holds anything either. Nor does a request in
    `pooled`, which ends with its vector.
    """

    plan: StepPlan
    sampled: list[tuple[Request, TokenOutput]] = field(default_factory=list)
    forked: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, PromptOutput]] = field(default_factory=list)
    candidates: list[tuple[Request, TokenOutput]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    pooled: list[tuple[Request, PooledOutput]] = field(default_factory=list)


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        scheduler: StepScheduler,
        clock: Callable[[], float] = time.perf_counter,
        guides: Guides | None = None,
    ) -> None:
        self.runner = runner
        self.guides = guides or no_guides()
        self.scheduler = scheduler
        self.sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
        self.times = StepTimes()
        self.num_steps = 0
        self.after_moves: list[Callable[[], None]] = []  # called after every copy of blocks
        self.ahead = LookAhead(runner, scheduler)
        self.pooler = Pooler()
        self._clock = clock
        scheduler.move_now = self._move

    def _move(self, moves: Sequence[Move]) -> None:
        """Moves blocks, and notes what it costs to load some from the host's cache."""
        start_s = self._clock()
        self.runner.move(moves)
        if (tier := self.scheduler.blocks.tier) is not None and any(move.kind == "in" for move in moves):
            tier.cost.loaded(len(moves), self._clock() - start_s)  # blocks on their way out cost as much
        for each in self.after_moves:
            each()

    def plan(self) -> StepPlan:
        start_s = self._clock()
        plan = self.ahead.plan()
        if plan is None:
            plan = self.scheduler.plan()
            plan.chunks = self.guides.without_unready(plan.chunks)
        self.times.plan_s += self._clock() - start_s
        return plan

    def run(self, plan: StepPlan, begins: Begins = begin_quietly) -> StepResult:
        """Computes a plan: forward pass, sampling, bookkeeping. A request that is handed over keeps its blocks."""
        result = StepResult(plan)
        on_layer = None if self.ahead.has_launched(plan) else begins(plan)
        times, start_s = self.times, self._clock()
        if plan.moves:
            self._move(plan.moves)
        if not plan.chunks:
            return result
        if (chosen := self.ahead.sample(plan, on_layer, begins)) is not None:
            sampled_s = self._clock()
            times.forward_s += sampled_s - start_s
            ready, sampled = chosen
            rows = [SamplingRow(request, request.index, len(request.output_token_ids)) for request in ready]
            self._commit(result, ready, _outputs(rows, sampled), {})
            times.commit_s += self._clock() - sampled_s
            self.num_steps += 1
            return result
        begun_s = self._clock()
        guided = self.guides.begin(plan.chunks)  # masks are built while the model runs
        output = self.runner.forward(plan.chunks, on_layer)
        computed_s = self._clock()
        times.forward_s += computed_s - start_s
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
        candidates = self._candidates(logits, sampling)
        outputs = self._sample(logits, sampling, guided)
        outputs.update((request, [vector]) for request, vector in pooled.items())
        sampled_s = self._clock()
        times.sample_s += sampled_s - computed_s
        self._commit(result, ready, outputs, candidates)
        times.commit_s += self._clock() - sampled_s
        self.num_steps += 1
        return result

    def step(self, begins: Begins = begin_quietly) -> StepResult:
        return self.run(self.plan(), begins)

    def _sample(self, logits: torch.Tensor, ready: list[Request], guided: Masks) -> dict[Request, list[RowOutput]]:
        """Returns the next tokens by request, one output for each of its sequences; `ready` has one row of logits each.

        A beam search has none: it chooses among candidates.
        """
        masks = guided.wait()
        rows = [
            SamplingRow(r, index, len(r.output_token_ids), masks.get(r.key)) for r in ready for index in _indices(r)
        ]
        at = [i for i, request in enumerate(ready) for _ in _indices(request)]
        sampled = self.sampler.sample(logits, rows, at if at != list(range(len(ready))) else None) if rows else []
        return _outputs(rows, sampled)

    def _commit(
        self,
        result: StepResult,
        ready: list[Request],
        outputs: dict[Request, list[RowOutput]],
        candidates: dict[str, list[Candidate]],
    ) -> None:
        for request in ready:
            chosen: list[NextTokens] = []
            for each in outputs.get(request, ()):
                if isinstance(each, PooledVector):
                    self._end_pooling(result, request, each)
                else:
                    chosen.append(each)
            if request.pooling is not None:
                continue
            if stuck := [each.row for each in chosen if each.is_stuck]:
                self._fail(result, stuck[0])
                continue
            if not request.output_token_ids and request.leg != "decode":
                result.prompts.append((request, self._prompt_output(request)))
            if request.key in candidates:
                self._grow(result, request, candidates[request.key])
                continue
            if len(chosen) == 1 and request.leg != "prefill":
                self._go_on(result, request, chosen[0])
                continue
            tokens = [self._token(each.row, each.tokens[0]) for each in chosen]  # others are computed again
            if request.leg == "prefill":
                self._hand_over(request, tokens)
                result.sampled += [(request, token) for token in tokens]
            else:
                sequences = {s.index: s for s in self.scheduler.start_sequences(request, tokens)}
                result.forked += [s for s in sequences.values() if s is not request]
                result.sampled += [(sequences.get(token.index, request), token) for token in tokens]

    def _token(self, row: SamplingRow, sampled: Sampled) -> TokenOutput:
        request = row.request
        ends = self.runner.eos_token_ids
        reason = request.finish_reason_after(sampled.token_id, row.position + 1, ends, row.may_end)
        return TokenOutput(
            request.request_id, request.attempt, row.index, row.position, sampled.token_id, reason, sampled.logprobs
        )

    def _fail(self, result: StepResult, row: SamplingRow) -> None:
        """Ends a request whose guide, alone or together with its other masks, left no token to choose."""
        problem = row.mask.problem if row.mask is not None else ""
        why = problem or "its guide and its other constraints leave no token to choose"
        self.scheduler.finish(row.request)
        result.failed.append((row.request, why))

    def _go_on(self, result: StepResult, request: Request, output: NextTokens) -> None:
        row = output.row
        for sampled in output.tokens:
            token = self._token(row, sampled)
            request.output_token_ids.append(token.token_id)
            result.sampled.append((request, token))
            if token.finish_reason is not None:
                self.scheduler.finish(request)
                return
            row = row._replace(position=row.position + 1)

    def _end_pooling(self, result: StepResult, request: Request, vector: PooledVector) -> None:
        self.scheduler.finish(request)
        if vector.problem:
            result.failed.append((request, vector.problem))
            return
        values = vector.values.astype("<f4").tobytes()
        num_cached = max(0, request.num_cached_tokens)
        result.pooled.append((request, PooledOutput(request.request_id, request.attempt, values, num_cached)))

    def _hand_over(self, request: Request, tokens: list[TokenOutput]) -> None:
        request.output_token_ids.append(tokens[0].token_id)
        if all(token.finish_reason is not None for token in tokens):
            self.scheduler.finish(request)
        else:
            self.scheduler.export(request)

    # ---- beam search

    def _candidates(self, logits: torch.Tensor, ready: list[Request]) -> dict[str, list[Candidate]]:
        """Returns the possible continuations by beam."""
        at = [i for i, request in enumerate(ready) if request.sampling.beam_width]
        if not at:
            return {}
        beams = [ready[i] for i in at]
        rows = [SamplingRow(beam, beam.index, len(beam.output_token_ids)) for beam in beams]
        return dict(zip([beam.key for beam in beams], self.sampler.candidates(logits, rows, at), strict=True))

    def _grow(self, result: StepResult, beam: Request, row: list[Candidate]) -> None:
        if beam.leg != "prefill":
            change = beam_groups.advance(self.scheduler, beam, row)
            result.forked += change.started
            result.ended += change.ended
            result.sampled += [(beam, token) for token in change.tokens]
            return
        search = BeamSearch(beam.sampling)
        search.advance([row])
        beam.output_token_ids.append(row[0].token_id)
        if search.is_over:
            self.scheduler.finish(beam)
            result.sampled += [(beam, token) for token in answer(beam, search)]
        else:
            self.scheduler.export(beam)
            result.candidates += [(beam, token) for token in first_tokens_of(beam, row)]

    # ---- outputs of a prompt

    def _prompt_output(self, request: Request) -> PromptOutput:
        num_cached = max(0, request.num_cached_tokens)
        return PromptOutput(request.request_id, request.attempt, num_cached, request.prompt_logprobs)

    def _prompt_logprobs(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        """Notes those of this step's prompt tokens; returns the rows of logits to sample from."""
        at, kept = 0, []
        for request, num_tokens in plan.chunks:
            num_rows = request.num_logit_rows(num_tokens)
            if num_rows and num_tokens == request.num_behind:
                kept.append(at + num_rows - 1)
            if request.wants_prompt_logprobs:
                self._note_prompt_logprobs(request, logits[at : at + num_rows])
            at += num_rows
        return logits[kept]

    def _note_prompt_logprobs(self, request: Request, logits: torch.Tensor) -> None:
        """Notes log-probabilities: row i has the logits after token num_computed_tokens + i, for the next token."""
        start, known = request.num_computed_tokens, request.prompt_logprobs
        if not known:
            known.append(None)  # nothing comes before the first token
        first = len(known) - 1 - start  # computed again after a preemption: earlier ones are noted already
        targets = request.prompt_token_ids[len(known) : start + 1 + len(logits)]
        wanted = request.sampling.prompt_logprobs or 0
        if first >= 0 and targets:
            known += self.sampler.prompt_logprobs(logits[first : first + len(targets)], targets, wanted)


def _without_pooled(
    logits: torch.Tensor, ready: list[Request], pooled: dict[Request, PooledVector]
) -> tuple[torch.Tensor, list[Request]]:
    """Adds the vectors that are made of logits; returns the requests that choose a token, and their rows of logits."""
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
    return (logits if len(kept) == at else logits[kept]), sampling


def _outputs(rows: list[SamplingRow], sampled: list[Sampled]) -> dict[Request, list[RowOutput]]:
    """Returns the tokens by request, one for each row."""
    outputs: dict[Request, list[RowOutput]] = {}
    for row, each in zip(rows, sampled, strict=True):
        outputs.setdefault(row.request, []).append(NextTokens(row, (each,)))
    return outputs


def _indices(request: Request) -> range:
    """Returns the sequences that get their next token from these logits: all of them when the prompt is computed.

    Empty for a beam search, which chooses in another way.
    """
    if request.sampling.beam_width:
        return range(0)
    is_first = request.sampling.n > 1 and request.index == 0 and not request.output_token_ids
    is_first = is_first and not request.is_resumed
    return range(request.sampling.n) if is_first else range(request.index, request.index + 1)
