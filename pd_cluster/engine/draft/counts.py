"""Counts of drafts since the start, under the definitions of vLLM's metrics."""

from __future__ import annotations

from pd_cluster.engine.draft.drafter import MOST_DRAFTS


class DraftTotals:
    """`num_drafts` counts sequences' steps with drafts. Neither a bonus token nor a correction counts as accepted."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at = [0] * MOST_DRAFTS  # by position in the draft
        self.drafting_s = 0.0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for at in range(num_accepted):
            self.num_accepted_at[at] += 1
