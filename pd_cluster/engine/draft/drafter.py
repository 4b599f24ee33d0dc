"""The interface of drafters, which guess the next tokens of a sequence. A wrong guess costs time, never an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.engine.draft.step_costs import StepCosts
from pd_cluster.types import Request


class Drafter(Protocol):
    """The engine's thread calls it between steps.

    A drafter's state of a sequence is keyed weakly by request, and each call extends it by the new tokens. It may be
    dropped at any time, because the request's tokens suffice to rebuild it. Between calls a shorter or different output
    may have replaced the output (a resumed request).
    """

    name: str
    costs: StepCosts | None = None  # the time of one draft for this many sequences; None: negligible
    needs_blocks: bool = False  # its keys and values are in the sequences' blocks, which a step's moves may change

    def is_for(self, request: Request) -> bool:
        """Whether it can ever make drafts for this request."""
        return True

    def look(self, requests: Sequence[Request], most: int, spare_s: float) -> None:
        """Prepares for the drafts of a step: `draft` will be called for these requests, for at most `most` tokens each.

        `spare_s`: the time that it may spend on work for later steps.
        """
        return

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns up to `most` (1 or more) tokens that may follow the request's tokens; no tokens without a guess."""

    def ended(self, request: Request) -> None:
        """Handles that a sequence has its last token: no other call for it follows."""
