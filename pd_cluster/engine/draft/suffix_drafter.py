"""Drafts the most frequent continuations of the last tokens, in the sequence and in earlier outputs (suffix decoding).

The method is from Oliaro et al., "SuffixDecoding", 2024; the settings have vLLM's names. The authors' trees hold all
substrings with counts. Here only the best matches are counted, when a draft is needed, so a token costs microseconds
and tens of bytes at any depth.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pd_cluster.engine.draft.context_index import END, IndexedText, hash_contexts
from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.earlier_outputs import EarlierOutputs
from pd_cluster.engine.draft.token_history import TokenHistory
from pd_cluster.types import Request

MAX_POSITIONS = 16  # the most positions whose continuations are counted

# How many tokens before a position equal the sequence's last tokens, and the tokens from the position on, padded with
# END.
Place = tuple[int, "array[int]"]


class Draft(NamedTuple):
    token_ids: list[int]
    score: float  # the expected number of right tokens, with counts taken as probabilities


class SuffixDrafter(Drafter):
    """Drafts the tokens that most often followed the longest suffixes of the sequence.

    The class of a position is the largest power of two n such that the n tokens before it equal the sequence's last n
    tokens. The MAX_POSITIONS positions of the highest classes are counted; within a class, the newest come first. For
    each length m below `max_tree_depth`, the positions that match m tokens or more give one draft.

    Each token of a draft is the most frequent next token at these positions; on a tie, the first position's token. Its
    probability is its share of the positions whose texts continue, times the previous token's probability. The draft
    ends before a token whose probability is under `min_token_prob`, after `max_spec_factor` * m tokens, or when m plus
    its length equals `max_tree_depth`. The draft with the highest sum of probabilities wins, whether from the sequence
    itself or from earlier outputs of its scope (cache salt and variant). On a tie, the sequence's own draft and the
    longer match win.

    At most `max_cached_requests` outputs are kept, and at most `most_nbytes` are used in total. Running sequences have
    priority: earlier outputs are dropped to make memory for them. A sequence that still gets no memory has drafts from
    earlier outputs only.
    """

    name = "suffix"

    def __init__(
        self,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        most_nbytes: int,
    ) -> None:
        self._reach = max(1, max_tree_depth - 1)
        self._lengths = [1 << i for i in range(self._reach.bit_length())]
        self._max_cached_requests, self._min_token_prob = max_cached_requests, min_token_prob
        self._most_nbytes = most_nbytes
        self._limits = [  # the maximum number of drafts, by length of the match
            max(0, min(int(length * max_spec_factor + 1e-6), max_tree_depth - length))
            for length in range(self._reach + 1)
        ]
        self._peak = max(range(self._reach + 1), key=self._limits.__getitem__)  # the match length with most drafts
        self._histories: WeakKeyDictionary[Request, TokenHistory] = WeakKeyDictionary()
        self.earlier = EarlierOutputs(self._lengths, self._reach, most_nbytes)

    @property
    def nbytes(self) -> int:
        return self.earlier.nbytes + self._own_nbytes()

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns at most `most` tokens; no tokens without a match or a likely token."""
        history, order = self._history(request), request.order
        own = [history.text] if history is not None else []
        earlier = self.earlier.texts((order.cache_salt, order.variant))
        first, end = request.num_virtual_tokens, request.num_tokens
        newest_first = request.token_ids(max(first, end - self._reach), end)[::-1]
        hashes = hash_contexts(newest_first, self._lengths)
        best = Draft([], 0.0)
        for texts in filter(None, (own, earlier)):
            best = self._better(best, texts, newest_first, hashes, most)
        return best.token_ids

    def ended(self, request: Request) -> None:
        """Adds an output, preceded by the end of its prompt, to the earlier outputs of its scope."""
        self._histories.pop(request, None)
        if not self._max_cached_requests or not request.output_token_ids:
            return
        order, num_prompt = request.order, len(request.prompt_token_ids)
        start = max(request.num_virtual_tokens, num_prompt - self._reach)
        self.earlier.add((order.cache_salt, order.variant), request.token_ids(start, request.num_tokens))
        while self.earlier.num_outputs > self._max_cached_requests:
            self.earlier.drop_output()
        self._free(0)

    def _history(self, request: Request) -> TokenHistory | None:
        """Returns the request's history, updated with its tokens; None if there is no memory for it."""
        history = self._histories.get(request)
        if history is None or not history.followed.goes_on(request):
            self._histories.pop(request, None)
            if not self._free(TokenHistory.nbytes_at_first(request.num_tokens, self._lengths, self._reach)):
                return None
            history = self._histories[request] = TokenHistory(request, self._lengths, self._reach)
        num_indexes = len(history.text.indexes)
        history.extend(request)
        if len(history.text.indexes) > num_indexes and not self._free(0):
            del self._histories[request]
            return None
        return history

    def _own_nbytes(self) -> int:
        return sum(history.text.nbytes for history in self._histories.values())

    def _free(self, wanted: int) -> bool:
        """Drops earlier outputs until this many bytes are free; drops none if that cannot suffice.

        Returns whether they are free.
        """
        most = self._most_nbytes - self._own_nbytes() - wanted
        while 0 <= most < self.earlier.nbytes:
            self.earlier.drop_text()
        return most >= 0

    def _better(
        self, best: Draft, texts: Sequence[IndexedText], newest_first: list[int], hashes: list[int], most: int
    ) -> Draft:
        """Returns the best draft from these texts, or `best` if none has a higher score."""
        places: list[Place] = []
        above = len(newest_first) + 1  # matches of this length or more have been tried
        for which in reversed(range(len(self._lengths))):
            length = self._lengths[which]
            if length >= above:
                continue
            if best.score >= min(most, self._limits[min(self._peak, above - 1)]):
                break  # no shorter match allows more tokens
            tops = {above - 1} if places else set()
            if len(places) < MAX_POSITIONS:
                found = self._of_class(which, above, texts, newest_first, hashes[which])
                places += islice(found, MAX_POSITIONS - len(places))
                tops.update(num_matched for num_matched, _ in places if num_matched < above)
            for top, next_top in pairwise([*sorted(tops, reverse=True), length - 1]):
                # All match lengths in (next_top, top] have the same positions, so use the one that allows most drafts.
                limit = min(most, self._limits[min(max(self._peak, next_top + 1), top)])
                if limit > best.score:
                    draft = self._likeliest([after for num_matched, after in places if num_matched >= top], limit)
                    best = draft if draft.score > best.score else best
            above = length
        return best

    def _of_class(
        self, which: int, above: int, texts: Sequence[IndexedText], newest_first: list[int], value: int
    ) -> Iterator[Place]:
        """Yields positions that match at least this class's length and less than `above`, the newest first."""
        length, most, width = self._lengths[which], min(above, len(newest_first)), self._limits[self._peak]
        context = array("i", newest_first[length - 1 :: -1])
        for text in texts:
            tokens = text.tokens
            for place in text.places(which, value):
                if tokens[place] == END or tokens[place - length : place] != context:
                    continue
                num_matched = length
                while num_matched < most and tokens[place - num_matched - 1] == newest_first[num_matched]:
                    num_matched += 1
                if num_matched < above:
                    yield num_matched, tokens[place : place + width]

    def _likeliest(self, continuations: list[array[int]], limit: int) -> Draft:
        newest = continuations[0][:limit]
        if END not in newest and all(each[:limit] == newest for each in continuations):
            return Draft(newest.tolist(), float(limit))
        token_ids: list[int] = []
        score, probability = 0.0, 1.0
        for at in range(limit):
            counts: dict[int, int] = {}
            for continuation in continuations:
                token_id = continuation[at]
                counts[token_id] = counts.get(token_id, 0) + 1
            num_ended = counts.pop(END, 0)
            if not counts:
                break
            token_id = max(counts, key=counts.__getitem__)
            probability *= counts[token_id] / (len(continuations) - num_ended)
            if probability < self._min_token_prob:
                break
            token_ids.append(token_id)
            score += probability
            if counts[token_id] < len(continuations):
                continuations = [each for each in continuations if each[at] == token_id]
        return Draft(token_ids, score)
