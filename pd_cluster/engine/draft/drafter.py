"""The interface of drafters: who guesses the next tokens of a sequence. A wrong guess costs time, never an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.types import Request


class Drafter(Protocol):
    """Called by the engine's thread, between steps.

    State of a sequence follows its tokens: it is kept by weak reference to the request, extended by the tokens that are
    new since the last call, and can be dropped at any time, because the request's tokens suffice to make it again. The
    output may have been replaced by a shorter or another one since (a resumed request).
    """

    name: str

    def is_for(self, request: Request) -> bool:
        """Whether it may ever have a guess about this request."""
        return True

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns at most `most` (1 or more) tokens that may follow all tokens of the request; none without a guess."""

    def ended(self, request: Request) -> None:
        """Takes notice of a sequence that has its last token: no other call for it follows."""
