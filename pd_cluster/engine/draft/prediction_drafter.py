"""Drafts from the answer that a request predicts (OpenAI's Predicted Outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.token_history import FollowedOutput
from pd_cluster.types import Request

LONGEST_MATCH = 8  # the most output tokens that are compared to find the position again
MAX_POSITIONS = 32  # the most positions that are compared on each side of the last sure position
SINGLE_MATCH_DISTANCE = 16  # a single token is searched among this many tokens after the last sure position
SINGLE_MATCH_TOKENS = 8  # up to this many output tokens after a deviation, a single matching token suffices
PART = 8192  # one call sorts this many pairs of a prediction, in about a millisecond

Ints = NDArray[np.int64]


class PredictionDrafter(Drafter):
    """Copies the prediction from the position that the output has reached; finds the position again after deviations.

    While output tokens equal the predicted ones, the position advances. After a deviation, the drafter searches the
    prediction for the longest match of the last output tokens (8 to 2 of them), and the position is the end of that
    match. Among equal matches, the nearest at or after the last sure position wins, otherwise the nearest before it.
    The 32 nearest positions of the last two tokens are compared on each side. If these two tokens do not occur and the
    deviation is short, the last token alone is searched in the next 16 predicted tokens; this finds the end of a
    deletion or insertion. If that fails too, each output token is assumed to replace a predicted one. A position is
    sure once a token that it predicts was generated.
    """

    name = "prediction"

    def __init__(self) -> None:
        self._followers: WeakKeyDictionary[Request, _Follower] = WeakKeyDictionary()

    def is_for(self, request: Request) -> bool:
        return bool(request.order.prediction)

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """Returns at most `most` tokens; no tokens if there is no prediction or the position is unknown."""
        if not request.order.prediction or most < 1:
            return ()
        follower = self._followers.get(request)
        if follower is None or not follower.followed.goes_on(request):
            follower = self._followers[request] = _Follower(request)
        follower.follow()
        place = follower.place
        return () if place is None else follower.prediction[place : place + most]

    def ended(self, request: Request) -> None:
        self._followers.pop(request, None)


class _Follower:
    def __init__(self, request: Request) -> None:
        self.prediction = request.order.prediction
        self.followed = FollowedOutput(request)
        self.place: int | None = 0  # the index of the predicted token that may come next; None: unknown
        self._sure = 0  # the last position that a predicted token confirmed
        self._num_astray = 0  # output tokens since the last sure position
        self._pairs: PairIndex | None = None  # None until there is a deviation

    def follow(self) -> None:
        """Processes the output tokens that are new since the last call."""
        fresh = self.followed.take()
        num_equal = 0
        if self.place is not None:
            for token_id, predicted in zip(fresh, self.prediction[self.place : self.place + len(fresh)], strict=False):
                if token_id != predicted:
                    break
                num_equal += 1
            if num_equal:
                self.place = self._sure = self.place + num_equal
                self._num_astray = 0
        if num_equal < len(fresh):
            self._num_astray += len(fresh) - num_equal
            self.place = self._find(tuple(self.followed.token_ids[-LONGEST_MATCH:]))

    def _find(self, last: tuple[int, ...]) -> int | None:
        """Returns the position after the last output tokens."""
        if len(last) > 1 and (place := self._longest_match(last)):
            return place
        if self._num_astray > SINGLE_MATCH_TOKENS:
            return None
        near = self.prediction[self._sure : self._sure + SINGLE_MATCH_DISTANCE]
        if last[-1] in near:
            return self._sure + near.index(last[-1]) + 1
        return self._sure + self._num_astray

    def _longest_match(self, last: tuple[int, ...]) -> int:
        """Returns the position after the longest match of two or more tokens; 0 if there is none."""
        if self._pairs is None:
            self._pairs = PairIndex(self.prediction)
        best, longest = 0, 1
        for place in self._pairs.nearest(last[-2:], self._sure):
            length = 2
            while length < min(len(last), place) and self.prediction[place - length - 1] == last[-length - 1]:
                length += 1
            if length > longest:
                best, longest = place, length
            if length == len(last):
                break
        return best


class PairIndex:
    """Finds the positions after each pair of successive tokens in a prediction.

    Each look-up indexes one more part of the prediction.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._num_indexed = 0  # pairs
        self._parts: list[tuple[Ints, Ints]] = []  # pairs as integers, ascending; the positions after them

    def nearest(self, pair: Sequence[int], sure: int) -> list[int]:
        """Returns the MAX_POSITIONS nearest positions at or after `sure`, then the MAX_POSITIONS nearest before it."""
        if self._num_indexed < len(self._prediction) - 1:
            self._sort_part()
        wanted = np.int64((pair[0] << 32) + pair[1])
        spans = []
        for pairs, places in self._parts:
            start, stop = pairs.searchsorted(wanted), pairs.searchsorted(wanted, "right")
            if start < stop:
                spans.append((places[start:stop], int(places[start:stop].searchsorted(sure))))
        behind: list[int] = []
        for places, at in spans:
            behind += places[at : at + MAX_POSITIONS - len(behind)].tolist()
        before: list[int] = []
        for places, at in reversed(spans):
            before += places[max(0, at - MAX_POSITIONS + len(before)) : at][::-1].tolist()
        return behind + before

    def _sort_part(self) -> None:
        start = self._num_indexed
        tokens = np.array(self._prediction[start : start + PART + 1], np.int64)
        pairs = (tokens[:-1] << 32) + tokens[1:]
        order = pairs.argsort(kind="stable")
        self._parts.append((pairs[order], order + start + 2))
        self._num_indexed += len(pairs)
