"""The interface of drafters: who guesses the next tokens of a sequence. A wrong guess costs time, never an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.engine.draft.step_costs import StepCosts
from pd_cluster.types import Request


class Drafter(Protocol):
    """Called by the engine's thread, between steps.

    State of a sequence follows its tokens: it is kept by weak reference to the request, extended by the tokens that are
    new since the last call, and can be dropped at any time, because the request's tokens suffice to make it again. The
    output may have been replaced by a shorter or another one since (a resumed request).
    """

    name: str
    costs: StepCosts | None = None  # of one draft for each of so many sequences; None: not worth counting
    needs_blocks: bool = False  # its keys and values are in the sequences' blocks, which a step's moves come to change

    def is_for(self, request: Request) -> bool:
        """Whether it may ever have a guess about this request."""
        return True

    def look(self, requests: Sequence[Request], most: int, spare_s: float) -> None:
        """Prepares for the drafts of a step: it will be asked about these requests, for at most `most` tokens each.

        `spare_s`: the time that it may take for what will help only later steps.
        """
        return

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns at most `most` (1 or more) tokens that may follow all tokens of the request; none without a guess."""

    def ended(self, request: Request) -> None:
        """Takes notice of a sequence that has its last token: no other call for it follows."""
