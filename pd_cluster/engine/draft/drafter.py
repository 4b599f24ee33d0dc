"""The interface of drafters, which guess the next tokens of a sequence.

A wrong guess costs time but does not change the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.engine.draft.step_costs import StepCosts
from pd_cluster.types import Request


class Drafter(Protocol):
    """Guesses tokens. The engine's thread calls it between steps.

    A drafter keys its state of a sequence weakly by request, and each call adds the new tokens to that state. It may
    drop the state at any time, because it can rebuild it from the request's tokens. Between two calls, a shorter or
    different output may have replaced the output (a resumed request).
    """

    name: str
    costs: StepCosts | None = None  # the time of one draft, by number of sequences; None: negligible
    needs_blocks: bool = False  # its KV is in the sequences' blocks, so it makes no drafts in steps that move blocks

    def is_for(self, request: Request) -> bool:
        """Whether this drafter can ever make drafts for the request."""
        return True

    def look(self, requests: Sequence[Request], most: int, spare_s: float) -> None:
        """Prepares for the drafts of a step: `draft` will be called for these requests, for at most `most` tokens each.

        `spare_s`: the time that the drafter may spend on work for later steps.
        """
        return

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns up to `most` (at least 1) tokens that may follow the request's tokens; none if there is no guess."""

    def ended(self, request: Request) -> None:
        """Called after a sequence's last token; no other call for the sequence follows."""
