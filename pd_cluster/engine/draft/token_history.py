"""Holds the tokens of one sequence, prompt and output, and an index of their contexts that grows with them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pd_cluster.engine.draft.context_index import ContextIndex, IndexedText
from pd_cluster.types import Request

TOKENS_PER_CALL = 4096  # old tokens indexed in a call, times the number of context lengths: about half a millisecond
FEWEST_PER_CALL = 512
INDEX_TOKENS = 16384  # the size of an index of old tokens


class FollowedOutput:
    """Tracks how much of a request's output was processed. A resumed request may have a shorter or different output."""

    def __init__(self, request: Request) -> None:
        self.token_ids = request.output_token_ids
        self.num_seen = 0
        self._last = -1

    def goes_on(self, request: Request) -> bool:
        """Returns whether the output still begins with the processed tokens."""
        output, seen = request.output_token_ids, self.num_seen
        return output is self.token_ids and seen <= len(output) and (not seen or output[seen - 1] == self._last)

    def take(self) -> list[int]:
        """Returns the tokens that are new since the last call."""
        fresh = self.token_ids[self.num_seen :]
        if fresh:
            self.num_seen, self._last = self.num_seen + len(fresh), fresh[-1]
        return fresh


def _per_call(lengths: Sequence[int]) -> int:
    return max(FEWEST_PER_CALL, TOKENS_PER_CALL // len(lengths))


class TokenHistory:
    """A request's tokens, with indexes of their positions.

    The constructor indexes only the last tokens of the sequence. New tokens are indexed when they arrive. Each call
    also indexes one slice of the older tokens, so that no step waits for a long prompt; until all are indexed, a draft
    may miss a position. The older tokens are split into parts. The newest part is indexed first, because positions near
    the end are better guesses; within a part, slices follow in ascending order, as hash chains require. Virtual tokens
    of an adapter are not included.
    """

    def __init__(self, request: Request, lengths: Sequence[int], reach: int) -> None:
        self.followed = FollowedOutput(request)
        self.followed.take()
        self._per_call = _per_call(lengths)
        self._first = request.num_virtual_tokens
        num_tokens = request.num_tokens - self._first
        num_newest = min(num_tokens, self._per_call)
        self.text = text = IndexedText(lengths, reach, num_tokens + self._per_call)
        text.end += num_tokens - num_newest
        self._copy(request, max(0, num_tokens - num_newest - reach), num_tokens - num_newest)
        text.put_index(0, text.end, 2 * num_newest + 64)
        text.append(request.token_ids(request.num_tokens - num_newest, request.num_tokens))
        self._part: ContextIndex | None = None  # the index of old tokens that is incomplete

    @staticmethod
    def nbytes_at_first(num_tokens: int, lengths: Sequence[int], reach: int) -> int:
        """Returns the maximum number of bytes of a history of this many tokens, once all of them are indexed."""
        per_call = _per_call(lengths)
        num_places = num_tokens + min(num_tokens, per_call) + 64  # the newest part has memory for twice its tokens
        return 4 * (num_tokens + per_call + 2 * reach) + 12 * len(lengths) * num_places

    @property
    def num_unindexed(self) -> int:
        """The number of old tokens that are not yet indexed."""
        lacking = self._part.num_free if self._part is not None else 0
        return self.text.indexes[0].first - self.text.reach + lacking

    def extend(self, request: Request) -> None:
        """Adds the tokens that are new since the last call, and a slice of the old ones."""
        if fresh := self.followed.take():
            self.text.reserve(len(fresh))
            self.text.append(fresh)
        if self.num_unindexed:
            self._index_older(request)

    def _index_older(self, request: Request) -> None:
        text, part = self.text, self._part
        if part is None:
            stop = text.indexes[0].first
            start = max(text.reach, stop - INDEX_TOKENS)
            part = self._part = text.put_index(0, start, stop - start)
        start = part.stop - text.reach
        self._copy(request, max(0, start - text.reach), start + min(self._per_call, part.num_free))
        text.index(part, self._per_call)
        if not part.num_free:
            self._part = None

    def _copy(self, request: Request, start: int, stop: int) -> None:
        reach = self.text.reach
        token_ids = request.token_ids(self._first + start, self._first + stop)
        self.text.tokens[reach + start : reach + stop] = array("i", token_ids)
