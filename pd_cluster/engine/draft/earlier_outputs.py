"""Stores the outputs of ended sequences by scope, as indexed texts. Their bytes and their number are limited.

Drafts for a sequence come only from outputs of its own scope, so its speed reveals nothing about other scopes' outputs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_cluster.engine.draft.context_index import END, IndexedText

Scope = tuple[str, str]  # the cache salt and the variant of a request
MIN_TEXT_TOKENS = 256  # the smallest size of a text
MOST_TOKENS = 131072
GROWTH = 4  # each text is this many times as large as the previous one, so that a search covers few texts


@dataclass(slots=True)
class _Outputs:
    """Consecutive outputs of a scope, in one text."""

    text: IndexedText
    num_left: int  # tokens that can still be added
    stops: deque[int] = field(default_factory=deque)  # where each output ends in the text


class EarlierOutputs:
    """Outputs in the order in which they ended. The oldest outputs of the least recently used scope are dropped first.

    Times of use are not stored: if a sequence accepts a draft from an old output, the same tokens are also in its own,
    newer output, so the oldest outputs can be dropped. One text takes at most a quarter of `most_nbytes`; the owner
    drops texts when the total is exceeded.
    """

    def __init__(self, lengths: Sequence[int], reach: int, most_nbytes: int) -> None:
        self._lengths, self._reach = lengths, reach
        self._most_tokens = min(MOST_TOKENS, most_nbytes // 4 // (4 + 12 * len(lengths)))
        self._scopes: OrderedDict[Scope, deque[_Outputs]] = OrderedDict()  # the least recently used first
        self.num_outputs = 0
        self.nbytes = 0

    def texts(self, scope: Scope) -> list[IndexedText]:
        """Returns the scope's texts, the newest first. This counts as a use of the scope."""
        texts = self._scopes.get(scope)
        if texts is None:
            return []
        self._scopes.move_to_end(scope)
        return [each.text for each in reversed(texts)]

    def add(self, scope: Scope, token_ids: Sequence[int]) -> None:
        """Adds an output, or only its last tokens if it is too long for a text.

        Adds nothing if the byte limit allows no text.
        """
        if self._most_tokens < MIN_TEXT_TOKENS:
            return
        token_ids = (*token_ids[1 - self._most_tokens :], END)
        texts = self._scopes.setdefault(scope, deque())
        self._scopes.move_to_end(scope)
        if not texts or texts[-1].num_left < len(token_ids):
            wanted = GROWTH * len(texts[-1].text.tokens) if texts else MIN_TEXT_TOKENS
            texts.append(self._new(max(len(token_ids), min(wanted, self._most_tokens))))
        newest = texts[-1]
        newest.text.append(token_ids)
        newest.num_left -= len(token_ids)
        newest.stops.append(newest.text.end)
        self.num_outputs += 1

    def _new(self, num_tokens: int) -> _Outputs:
        text = IndexedText(self._lengths, self._reach, num_tokens)
        text.put_index(0, text.end, num_tokens)
        self.nbytes += text.nbytes
        return _Outputs(text, num_tokens)

    def drop_output(self) -> None:
        """Forgets the oldest output of the least recently used scope."""
        oldest = next(iter(self._scopes.values()))[0]
        oldest.text.first = oldest.stops.popleft()
        self.num_outputs -= 1
        if not oldest.stops:
            self.drop_text()

    def drop_text(self) -> None:
        """Forgets the oldest text of the least recently used scope and frees its memory."""
        scope, texts = next(iter(self._scopes.items()))
        oldest = texts.popleft()
        self.num_outputs -= len(oldest.stops)
        self.nbytes -= oldest.text.nbytes
        if not texts:
            del self._scopes[scope]
