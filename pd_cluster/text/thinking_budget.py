"""How many tokens a reply's reasoning may have: after that many, only the mark that closes it may follow.

Follows a sequence's tokens, and knows what each is as text. Knows nothing of other constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_cluster.types import Guide

BLANKS = b" \t\r\n"
MOST_TAIL_NBYTES = 256  # of text that is kept to find a mark in


class BudgetTree(msgspec.Struct, frozen=True):
    """The text of a guide of kind "budget". `starts`: whether the first token is reasoning, or only after a mark.

    `closes[0]` is written when the budget is used up. `inner`: the guide for the whole reply.
    """

    num_tokens: int
    starts: Literal["reasoning", "perhaps"]
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    inner: Guide | None = None


@dataclass(frozen=True, slots=True)
class Marks:
    """`close_ids`: the tokens of the mark that is written. `text_of` returns a token's bytes."""

    num_tokens: int
    opens: tuple[bytes, ...]
    closes: tuple[bytes, ...]
    close_ids: Sequence[int]
    text_of: Callable[[int], bytes]


class ThinkingBudget:
    """One sequence's reasoning so far."""

    def __init__(self, marks: Marks, is_inside: bool) -> None:
        self._marks = marks
        self._is_inside = is_inside
        self._is_over = False
        self._num_inside = 0
        self._tail = b""

    def copy(self) -> ThinkingBudget:
        made = ThinkingBudget(self._marks, self._is_inside)
        made._is_over, made._num_inside, made._tail = self._is_over, self._num_inside, self._tail
        return made

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._tail = (self._tail + self._marks.text_of(token_id))[-MOST_TAIL_NBYTES:]
            if self._is_inside:
                self._num_inside += 1
                num_forced = self._num_inside - self._marks.num_tokens
                is_closed = any(close in self._tail for close in self._marks.closes)
                self._is_over = is_closed or num_forced >= len(self._marks.close_ids)
            else:
                self._look_for_opening()

    def _look_for_opening(self) -> None:
        begun = self._tail.lstrip(BLANKS)
        if any(begun.startswith(mark) for mark in self._marks.opens):
            self._is_inside, self._tail = True, b""
        elif not any(mark.startswith(begun) for mark in self._marks.opens):
            self._is_over = True  # the reply begins without reasoning

    def limit(self, words: NDArray[np.uint32]) -> None:
        """Leaves only the closing mark's next token in a mask, if the budget is used up."""
        num_forced = self._num_inside - self._marks.num_tokens
        if self._is_over or not self._is_inside or num_forced < 0:
            return
        token_id = self._marks.close_ids[num_forced]
        words[:] = 0
        words[token_id // 32] = np.uint32(1 << token_id % 32)
