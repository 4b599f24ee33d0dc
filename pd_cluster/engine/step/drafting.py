"""Adds drafts to planned steps, and learns from their verification. Knows nothing of models or drafters' methods.

Drafts use only free blocks and the part of a step's token budget that its chunks leave. So a step has the same chunks
with drafts as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pd_cluster.engine.draft.draft_counts import DraftTotals
from pd_cluster.engine.draft.draft_size import DraftSize, Guess
from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.prediction_drafter import PredictionDrafter
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import DraftReport, Request

DEFAULTS = Speculation()
MAX_DRAFT_ROWS = 256  # the most drafts in a step; each needs a row of logits
MIN_CHANCE = 0.3  # if a guess is right with a lower chance, further drafters are tried
WAIT_STEPS = 16  # steps launched ahead until the host tries drafts again; doubled each time it finds none
MOST_WAIT_STEPS = 256


class Drafting:
    """Adds drafts to steps. `drafters` are tried in order. Without drafters, steps stay as planned."""

    def __init__(
        self,
        scheduler: StepScheduler,
        drafters: Sequence[Drafter],
        speculation: Speculation = DEFAULTS,
        vocab_size: int = 0,
        most_rows: int = MAX_DRAFT_ROWS,
    ) -> None:
        """`most_rows`: the most rows of a step, if that limit differs from the limit of tokens."""
        self._scheduler, self._drafters, self._speculation = scheduler, drafters, speculation
        self._vocab_size, self._most_rows = vocab_size, most_rows
        self._guesses: Mapping[Request, Guess] = {}  # the guesses for the planned step
        self._has_drafts = False
        self._num_waiting, self._wait_steps = 0, WAIT_STEPS
        self.size = DraftSize()
        self.totals = DraftTotals()

    def add_to(self, plan: StepPlan, clock: Callable[[], float]) -> None:
        """Adds drafts to a planned step if they promise more tokens per second."""
        self._guesses, self._has_drafts = {}, False
        if not self._drafters or not plan.chunks:
            return
        started_s, num_rows = clock(), sum(num_tokens == 1 for _, num_tokens in plan.chunks)
        most_each = self._speculation.most_drafts(len(plan.chunks))
        most = min(self._scheduler.max_num_batched_tokens - plan.num_tokens, MAX_DRAFT_ROWS, self._most_rows - num_rows)
        drafting = [request for request, num_tokens in plan.chunks if num_tokens == 1 and self._may_draft(request)]
        if not drafting or most <= 0:
            return
        names = {request: [each.name for each in self._drafters_of(request)] for request in drafting}
        if not self.size.can_pay(num_rows, names, most_each, most):
            return
        drafters = [each for each in self._drafters if not (each.needs_blocks and plan.moves)]
        self._guesses = self._find(drafting, drafters, num_rows, most_each)
        chosen = self.size.choose(num_rows, self._guesses, most)
        for request, num_drafts in chosen.items():
            if (num_drafts := self._scheduler.allocator.grow_for_drafts(request, num_drafts)) > 0:
                plan.drafts[request] = list(self._guesses[request].token_ids[:num_drafts])
        self._has_drafts = bool(plan.drafts)
        self.totals.drafting_s += clock() - started_s

    def _find(
        self, requests: Sequence[Request], drafters: Sequence[Drafter], num_rows: int, most: int
    ) -> dict[Request, Guess]:
        """Returns a guess for each sequence: from the first drafter that is often right, or the best one of all."""
        found: dict[Request, Guess] = {}
        left = {request: request.sampling.max_tokens - len(request.output_token_ids) - 1 for request in requests}
        for drafter in drafters:
            asked = [each for each in requests if left[each] > 0 and self._may_better(each, drafter, found.get(each))]
            depth = most
            if asked and drafter.costs is not None:
                depth = self.size.depth(asked, drafter.name, drafter.costs, num_rows, most)
            if not asked or not depth:
                continue
            drafter.look(asked, depth, self.size.costs.step_s(num_rows))
            for request in asked:
                if token_ids := self._known(drafter.draft(request, min(depth, left[request]))):
                    found[request] = Guess(drafter.name, token_ids, self.size.chance(request, drafter.name))
        return found

    def _may_better(self, request: Request, drafter: Drafter, guess: Guess | None) -> bool:
        """Whether to try another drafter for a sequence whose best guess so far is `guess`."""
        if not drafter.is_for(request):
            return False
        return guess is None or guess.chance < min(MIN_CHANCE, self.size.chance(request, drafter.name))

    def _known(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the drafts before the first one that is not in the model's vocabulary."""
        for at, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                return token_ids[:at]
        return token_ids

    def verified(self, plan: StepPlan, accepted: Mapping[Request, int], took_s: float) -> None:
        """Learns from a step that was computed in `took_s` seconds."""
        if not self._drafters:
            return
        for request, num_accepted in accepted.items():
            num_drafts, drafter = len(plan.drafts[request]), self._guesses[request].drafter
            self.totals.verified(num_drafts, num_accepted)
            self.size.verified(request, drafter, num_drafts, num_accepted)
            _report(request, num_drafts, num_accepted, drafter == PredictionDrafter.name)
        num_drafts = sum(len(plan.drafts[request]) for request in accepted)
        if plan.num_tokens == len(plan.chunks) and not plan.moves:
            self.size.costs.took(plan.num_tokens + num_drafts, took_s)

    def ended(self, requests: Iterable[Request]) -> None:
        """Informs drafters of sequences that have ended. A sequence may be listed several times."""
        for request in dict.fromkeys(requests):
            for drafter in self._drafters_of(request):
                drafter.ended(request)

    def wants_host(self, requests: Sequence[Request]) -> bool:
        """Whether the host should plan the next step, although the device could go ahead.

        As long as steps have drafts, the host plans them. Otherwise it tries to find drafts only from time to time.
        """
        if not self._drafters:
            return False
        if self._has_drafts:
            self._num_waiting, self._wait_steps = 0, WAIT_STEPS
            return True
        self._num_waiting += 1
        if self._num_waiting < self._wait_steps or not any(map(self._may_guess, requests)):
            return False
        self._num_waiting, self._wait_steps = 0, min(2 * self._wait_steps, MOST_WAIT_STEPS)
        return True

    def _may_guess(self, request: Request) -> bool:
        return self._may_draft(request) and any(each.draft(request, 1) for each in self._drafters_of(request))

    def _may_draft(self, request: Request) -> bool:
        return may_draft(request) and bool(self._drafters_of(request))

    def _drafters_of(self, request: Request) -> list[Drafter]:
        return [drafter for drafter in self._drafters if drafter.is_for(request)]


def _report(request: Request, num_drafts: int, num_accepted: int, is_predicted: bool) -> None:
    """Records the drafts of one step in the request's reports."""
    request.num_draft_tokens += num_drafts
    request.num_accepted_tokens += num_accepted
    if not (is_predicted or request.order.reports_drafts):
        return
    report = request.draft_report or DraftReport()
    if is_predicted:  # at most one draft counts as rejected, because drafts after a wrong one were not compared
        report = report.plus(num_accepted, int(num_accepted < num_drafts))
    if request.order.reports_drafts:
        report = report.plus(step=(num_drafts, num_accepted))
    request.draft_report = report


def may_draft(request: Request) -> bool:
    """Whether a sequence that has one token to compute may have drafts."""
    sampling = request.sampling
    return (
        request.order.may_draft
        and bool(request.output_token_ids)
        and request.leg != "prefill"
        and request.pooling is None
        and not sampling.beam_width
        and not request.wants_prompt_logprobs
    )
