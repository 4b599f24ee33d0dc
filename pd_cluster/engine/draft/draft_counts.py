"""Counts drafts since the start, as vLLM's metrics define them."""

from __future__ import annotations

from pd_cluster.wire import DraftCounts


class DraftTotals:
    """Totals since the start. The token after the last draft or in place of a wrong one is not counted as accepted."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._num_accepted_at: list[int] = []  # by position, up to the last with an accepted token
        self.drafting_s = 0.0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a sequence's drafts in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self._num_accepted_at += [0] * (num_accepted - len(self._num_accepted_at))
        for at in range(num_accepted):
            self._num_accepted_at[at] += 1

    def counts(self) -> DraftCounts:
        return DraftCounts(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            tuple(self._num_accepted_at),
            self.drafting_s,
        )
