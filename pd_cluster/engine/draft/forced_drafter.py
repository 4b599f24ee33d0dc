"""Drafts tokens that a guide forces: the only text that the guide allows next, as the tokenizer splits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.types import Request


class ForcedTokens(Protocol):
    """The part of guides that this drafter needs."""

    def forced(self, requests: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        """Returns, for each request, the tokens of the text that must come next.

        Requests without such text may be absent.
        """


class ForcedDrafter(Drafter):
    name = "forced"

    def __init__(self, guides: ForcedTokens) -> None:
        self._guides = guides
        self._found: WeakKeyDictionary[Request, Sequence[int]] = WeakKeyDictionary()

    def is_for(self, request: Request) -> bool:
        return request.sampling.guide is not None

    def look(self, requests: Sequence[Request], most: int, spare_s: float) -> None:
        """Looks up all guided requests of a step in one call, because each call waits for another thread."""
        self._found.clear()
        self._found.update(self._guides.forced(requests))

    def draft(self, request: Request, most: int) -> Sequence[int]:
        return self._found.get(request, ())[:most]

    def ended(self, request: Request) -> None: ...
