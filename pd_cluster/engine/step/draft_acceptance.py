"""Verifies drafts. Each row's token is drawn as if the row had its own step, so drafts do not change the output.

A row counts as long as all earlier tokens equal their drafts. If a sequence's choice depends on its earlier tokens
(penalties, masks, guides) or uses random numbers, its rows are drawn one after another, each once the earlier tokens
are known. The rows of all other sequences are drawn at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step.commit import Commit, StepResult
from pd_cluster.engine.step.step_outputs import NextToken
from pd_cluster.model.sampling.grammar_masks import TokenMask
from pd_cluster.model.sampling.logit_adjustments import adjusts
from pd_cluster.model.sampling.sampler import Sampled, Sampler, SamplingRow
from pd_cluster.types import Request, Status

# Maps requests' keys to the mask for the next token, followed by the mask after each draft.
StepMasks = Mapping[str, Sequence[TokenMask]]


class DraftRows(NamedTuple):
    """The drafts of one sequence. The logits after draft j are in row `first_row` + j of the step's logits."""

    request: Request
    drafts: Sequence[int]
    first_row: int

    @property
    def are_plain(self) -> bool:
        """Whether the choice of each token depends only on its logits."""
        sampling, position = self.request.sampling, len(self.request.output_token_ids) + 1
        return sampling.greedy and sampling.guide is None and not adjusts(sampling, position)

    def at_once(self) -> list[tuple[SamplingRow, int]]:
        """Returns the rows that are drawn together with the first tokens, each with the number of its row of logits."""
        if not self.are_plain:
            return []
        row = SamplingRow(self.request, self.request.index, len(self.request.output_token_ids) + 1)
        return [(row._replace(position=row.position + j), self.first_row + j) for j in range(len(self.drafts))]


def draft_rows(plan: StepPlan, first_row: int) -> list[DraftRows]:
    """Returns a step's drafts in the order of their rows of logits, which begin at `first_row`."""
    found: list[DraftRows] = []
    for request, _ in plan.chunks if plan.drafts else ():
        if drafts := plan.drafts.get(request):
            found.append(DraftRows(request, drafts, first_row))
            first_row += len(drafts)
    return found


class Acceptance:
    """Records the tokens that follow accepted drafts."""

    def __init__(self, sampler: Sampler, scheduler: StepScheduler, commit: Commit) -> None:
        self._sampler, self._scheduler, self._commit = sampler, scheduler, commit

    def accept(
        self,
        result: StepResult,
        rows: Sequence[DraftRows],
        logits: torch.Tensor,
        known: Mapping[Request, Sequence[Sampled]],
        masks: StepMasks,
    ) -> dict[Request, int]:
        """Records the tokens that follow each sequence's first token.

        Returns how many drafts of each sequence were accepted. `known`: the tokens of rows that were drawn at once.
        """
        accepted = dict.fromkeys((each.request for each in rows), 0)
        depth, going = 0, [each for each in rows if _is_right(each, 0, masks)]
        while going:
            for each in going:
                self._scheduler.accepted(each.request)
                accepted[each.request] += 1
            for output in self._draw(going, depth, logits, known, masks):
                self._commit.next_token(result, output)
            depth += 1
            going = [each for each in going if _is_right(each, depth, masks)]
        return accepted

    def _draw(
        self,
        going: Sequence[DraftRows],
        depth: int,
        logits: torch.Tensor,
        known: Mapping[Request, Sequence[Sampled]],
        masks: StepMasks,
    ) -> list[NextToken]:
        """Draws the token after draft `depth` of each sequence."""
        drawn: list[SamplingRow] = []
        at: list[int] = []
        outputs: list[NextToken] = []
        for request, _, first_row in going:
            row = SamplingRow(request, request.index, len(request.output_token_ids))
            if (sampled := known.get(request)) is not None:
                outputs.append(NextToken(row, sampled[depth]))
                continue
            if request.sampling.guide is not None:
                row = row._replace(mask=masks[request.key][depth + 1])
            drawn.append(row)
            at.append(first_row + depth)
        if drawn:
            outputs += map(NextToken, drawn, self._sampler.sample(logits, drawn, at))
        return outputs


def _is_right(rows: DraftRows, depth: int, masks: StepMasks) -> bool:
    """Whether the sequence continues, its last token equals draft `depth`, and its guide accepts that token."""
    request, drafts, _ = rows
    if request.status is not Status.RUNNING or depth == len(drafts) or request.output_token_ids[-1] != drafts[depth]:
        return False
    return request.sampling.guide is None or depth + 1 < len(masks[request.key])
