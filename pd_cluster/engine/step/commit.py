"""Records a step's outputs: sequences continue, fork, end or are handed over. Knows nothing of logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step import beam_groups
from pd_cluster.engine.step.beam_search import BeamSearch, answer, first_tokens_of
from pd_cluster.engine.step.step_outputs import NextToken, PooledVector, RowOutput
from pd_cluster.types import Candidate, PooledOutput, PromptOutput, Request, TokenOutput


@dataclass(slots=True)
class StepResult:
    """The results of a step.

    Requests that finished, failed, crashed or were pooled no longer hold blocks.
    """

    plan: StepPlan
    # Pairs each sequence with its new tokens, in order. A prompt that is handed over is paired with the first tokens of
    # all its sequences. A beam search has no entries until it ends; then it has all tokens of its answer, each paired
    # with one of its beams.
    sampled: list[tuple[Request, TokenOutput]] = field(default_factory=list)
    forked: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, PromptOutput]] = field(default_factory=list)  # each request once
    candidates: list[tuple[Request, TokenOutput]] = field(default_factory=list)  # for handing over a beam search
    ended: list[Request] = field(default_factory=list)  # dropped beams
    failed: list[tuple[Request, str]] = field(default_factory=list)  # (sequence that can have no output, reason)
    crashed: list[tuple[Request, str]] = field(default_factory=list)  # (request whose processor has failed, reason)
    pooled: list[tuple[Request, PooledOutput]] = field(default_factory=list)  # requests that end with a vector

    def groups(self) -> Iterable[tuple[Request, list[TokenOutput]]]:
        """Returns `sampled`, grouped by sequence, because drafts may give a sequence several tokens."""
        if not self.plan.drafts:
            return ((request, [token]) for request, token in self.sampled)
        found: dict[tuple[Request, int], list[TokenOutput]] = {}
        for request, token in self.sampled:
            found.setdefault((request, token.index), []).append(token)
        return ((request, tokens) for (request, _), tokens in found.items())


class Commit:
    """Records outputs in the scheduler and in a step's result."""

    def __init__(self, scheduler: StepScheduler, eos_token_ids: frozenset[int]) -> None:
        self._scheduler, self._ends = scheduler, eos_token_ids

    def step(
        self,
        result: StepResult,
        ready: Sequence[Request],
        outputs: Mapping[Request, Sequence[RowOutput]],
        candidates: Mapping[str, Sequence[Candidate]],
    ) -> None:
        """Records the outputs of requests whose last token is computed: one per sequence, or a beam's candidates."""
        for request in ready:
            chosen: list[NextToken] = []
            for each in outputs.get(request, ()):
                if isinstance(each, PooledVector):
                    self._end_pooling(result, request, each)
                else:
                    chosen.append(each)
            if request.pooling is not None:
                continue
            if stuck := [each for each in chosen if each.is_stuck]:
                self._fail(result, stuck[0])
                continue
            if not request.output_token_ids and request.leg != "decode":
                result.prompts.append((request, _prompt_output(request)))
            if request.key in candidates:
                self._grow(result, request, candidates[request.key])
            elif len(chosen) == 1 and request.leg != "prefill":
                self.next_token(result, chosen[0])
            else:
                self._first_tokens(result, request, [self._token(each) for each in chosen])

    def next_token(self, result: StepResult, output: NextToken) -> None:
        """Adds a token to a sequence, which continues or ends."""
        request = output.row.request
        if output.is_stuck:
            self._fail(result, output)
            return
        token = self._token(output)
        request.output_token_ids.append(token.token_id)
        result.sampled.append((request, token))
        if token.finish_reason is not None:
            self._scheduler.finish(request)

    def _first_tokens(self, result: StepResult, request: Request, tokens: list[TokenOutput]) -> None:
        """Hands a computed prompt over, or starts its sequences on this instance."""
        if request.leg == "prefill":
            self._hand_over(request, tokens)
            result.sampled += [(request, token) for token in tokens]
            return
        sequences = {s.index: s for s in self._scheduler.start_sequences(request, tokens)}
        result.forked += [s for s in sequences.values() if s is not request]
        result.sampled += [(sequences.get(token.index, request), token) for token in tokens]

    def _token(self, output: NextToken) -> TokenOutput:
        row, (token_id, logprobs, _) = output
        request = row.request
        reason = request.finish_reason_after(token_id, row.position + 1, self._ends, row.may_end)
        return TokenOutput(request.request_id, request.attempt, row.index, row.position, token_id, reason, logprobs)

    def _fail(self, result: StepResult, output: NextToken) -> None:
        """Ends a request whose logits processor has failed, or whose guide and other masks leave no token to choose."""
        row = output.row
        self._scheduler.finish(row.request)
        if output.sampled.problem:
            result.crashed.append((row.request, output.sampled.problem))
            return
        problem = row.mask.problem if row.mask is not None else ""
        result.failed.append((row.request, problem or "its guide and its other constraints leave no token to choose"))

    def _end_pooling(self, result: StepResult, request: Request, vector: PooledVector) -> None:
        self._scheduler.finish(request)
        if vector.problem:
            result.failed.append((request, vector.problem))
            return
        values = vector.values.astype("<f4").tobytes()
        num_cached = max(0, request.num_cached_tokens)
        result.pooled.append((request, PooledOutput(request.request_id, request.attempt, values, num_cached)))

    def _hand_over(self, request: Request, tokens: list[TokenOutput]) -> None:
        request.output_token_ids.append(tokens[0].token_id)
        if all(token.finish_reason is not None for token in tokens):
            self._scheduler.finish(request)
        else:
            self._scheduler.export(request)

    def _grow(self, result: StepResult, beam: Request, row: Sequence[Candidate]) -> None:
        if beam.leg != "prefill":
            change = beam_groups.advance(self._scheduler, beam, row)
            result.forked += change.started
            result.ended += change.ended
            result.sampled += [(beam, token) for token in change.tokens]
            return
        search = BeamSearch(beam.sampling)
        search.advance([row])
        beam.output_token_ids.append(row[0].token_id)
        if search.is_over:
            self._scheduler.finish(beam)
            result.sampled += [(beam, token) for token in answer(beam, search)]
        else:
            self._scheduler.export(beam)
            result.candidates += [(beam, token) for token in first_tokens_of(beam, row)]


def _prompt_output(request: Request) -> PromptOutput:
    num_cached = max(0, request.num_cached_tokens)
    return PromptOutput(request.request_id, request.attempt, num_cached, request.prompt_logprobs)
