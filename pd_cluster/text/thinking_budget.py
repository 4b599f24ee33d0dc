"""Limits the tokens of a reply's reasoning. Once they are used up, only the mark that closes the reasoning may follow.

An incomplete character is completed before the mark: the reasoning stays valid text, and a grammar for the reply
accepts the mark. Knows nothing of other constraints.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_cluster.types import Guide

BLANKS = b" \t\r\n"
MOST_TAIL_NBYTES = 256  # the number of last bytes that are kept to search for a mark


class BudgetTree(msgspec.Struct, frozen=True):
    """The text of a guide of kind "budget". `starts`: whether reasoning begins with the first token, without a mark.

    `closes[0]` is written when the budget is used up. `inner`: the guide for the whole reply.
    """

    num_tokens: int
    starts: Literal["reasoning", "perhaps"]
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    inner: Guide | None = None


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """`close_ids`: the tokens of the closing mark. `text_of` returns a token's bytes.

    `continuing`: the tokens whose first byte continues a character, with their bytes.
    """

    num_tokens: int
    opens: tuple[bytes, ...]
    closes: tuple[bytes, ...]
    close_ids: Sequence[int]
    text_of: Callable[[int], bytes]
    continuing: Callable[[], Sequence[tuple[int, bytes]]]


class ThinkingBudget:
    """One sequence's reasoning so far."""

    def __init__(self, marks: ThinkingMarkers, is_inside: bool) -> None:
        self._marks = marks
        self._is_inside = is_inside
        self._is_over = False
        self._num_inside = 0
        self._num_closing = 0  # tokens of the closing mark that were forced on the model
        self._tail = b""

    def copy(self) -> ThinkingBudget:
        made = ThinkingBudget(self._marks, self._is_inside)
        made._is_over, made._num_inside, made._num_closing = self._is_over, self._num_inside, self._num_closing
        made._tail = self._tail
        return made

    @property
    def is_used_up(self) -> bool:
        """Whether the budget ran out within reasoning: only the closing mark or the rest of a character may follow."""
        return self._is_inside and not self._is_over and self._num_inside >= self._marks.num_tokens

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            is_closing = self.is_used_up and not self._unfinished
            self._tail = (self._tail + self._marks.text_of(token_id))[-MOST_TAIL_NBYTES:]
            if self._is_inside:
                self._num_inside += 1
                self._num_closing += is_closing
                is_closed = any(close in self._tail for close in self._marks.closes)
                self._is_over = is_closed or self._num_closing >= len(self._marks.close_ids)
            else:
                self._look_for_opening()

    def _look_for_opening(self) -> None:
        begun = self._tail.lstrip(BLANKS)
        if any(begun.startswith(mark) for mark in self._marks.opens):
            self._is_inside, self._tail = True, b""
        elif not any(mark.startswith(begun) for mark in self._marks.opens):
            self._is_over = True  # the reply begins without reasoning

    @property
    def _unfinished(self) -> bytes:
        """The bytes of an incomplete character at the end of the reasoning; b"" once the closing mark has begun."""
        return b"" if self._num_closing else _unfinished(self._tail)

    def limit(self, words: NDArray[np.uint32]) -> None:
        """If the budget is used up, allows only the closing mark's next token, or the rest of a character."""
        if not self.is_used_up:
            return
        if begun := self._unfinished:
            rest = np.zeros_like(words)
            for token_id, text in self._marks.continuing():
                if _extends(begun, text):
                    rest[token_id // 32] |= np.uint32(1 << token_id % 32)
            if (rest & words).any():
                words &= rest
            return
        token_id = self._marks.close_ids[self._num_closing]
        words[:] = 0
        words[token_id // 32] = np.uint32(1 << token_id % 32)


def _unfinished(text: bytes) -> bytes:
    """Returns the bytes of an incomplete character at the text's end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    return decoder.getstate()[0]


def _extends(begun: bytes, text: bytes) -> bool:
    """Whether the text continues or completes the character, without an incomplete character after it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(begun + text)
    except UnicodeDecodeError:
        return False
    return decoder.getstate()[0] in (b"", begun + text)
