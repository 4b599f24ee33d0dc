"""Drafts from the sequence itself: the tokens that followed earlier occurrences of its last tokens (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from pd_cluster.engine.draft.context_index import IndexedText
from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.token_history import TokenHistory
from pd_cluster.types import Request


class NgramDrafter(Drafter):
    """Copies the tokens after the latest earlier occurrence of the sequence's last tokens.

    The longest suffix that occurred before is used, of `prompt_lookup_min` to `prompt_lookup_max` tokens.

    A copy that reaches the sequence's end repeats the copied tokens, so drafts of a loop can have any length. (Saxena,
    "Prompt Lookup Decoding", 2023.)
    """

    name = "ngram"

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._lengths = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._histories: WeakKeyDictionary[Request, TokenHistory] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        return sum(history.text.nbytes for history in self._histories.values())

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns exactly `most` tokens, or no tokens if the sequence's last tokens have not occurred before."""
        history = self._histories.get(request)
        if history is None or not history.followed.goes_on(request):
            history = self._histories[request] = TokenHistory(request, self._lengths, self._lengths[-1])
        history.extend(request)
        text = history.text
        place = _latest(text)
        if not place or most < 1:
            return ()
        found = text.tokens[place : min(place + most, text.end)].tolist()
        return found if len(found) == most else (found * (most // len(found) + 1))[:most]

    def ended(self, request: Request) -> None:
        self._histories.pop(request, None)


def _latest(text: IndexedText) -> int:
    """Returns the position of the longest suffix of the text that occurred before; 0 if there is none."""
    tokens, end = text.tokens, text.end
    num_tokens = end - text.reach
    hashes = text.hashes()
    for which in reversed(range(len(text.lengths))):
        length = text.lengths[which]
        if length > num_tokens:
            continue
        suffix = tokens[end - length : end]
        for place in text.places(which, hashes[which]):
            if tokens[place - length : place] == suffix:
                return place
    return 0
