"""Text that comes in pieces, for readers that are written as if all of it were there.

A reader is a generator. Where it needs more text it yields, and goes on when there is some or it has ended; so what it
finds cannot depend on how the text was cut. Knows nothing of what the text means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], object]

BLANKS = " \t\r\n"
BLANK_RUN = re.compile(f"[{BLANKS}]*")


def ignore(text: str) -> None:
    """For text that nobody wants."""


class Stream:
    """Every character is looked at a bounded number of times, however small the pieces are."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what is before was taken
        self._kept: list[str] | None = None
        self._is_ended = False

    # ---- for who has the text

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._is_ended = True

    # ---- for readers

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def begins(self, text: str) -> Steps[bool]:
        """Whether this comes next."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                return True
            if self._is_ended or not text.startswith(here):
                return False
            yield

    def take(self, num_chars: int) -> str:
        """Of those that are there, as the reader has made sure."""
        taken = self._text[self._at : self._at + num_chars]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def take_pair(self) -> Steps[str]:
        """Two characters, fewer at the end."""
        while len(self._text) < self._at + 2 and not self._is_ended:
            yield
        return self.take(2)

    def run(self, pattern: re.Pattern[str], emit: Emit = ignore) -> Steps[None]:
        """Takes the longest run of the pattern's characters; it is a class of characters, repeated."""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None or match.end() == self._at:
                return
            emit(self.take(match.end() - self._at))

    def blanks(self) -> Steps[None]:
        yield from self.run(BLANK_RUN)

    def until(self, markers: Sequence[str], emit: Emit) -> Steps[str]:
        """Takes the text before the first of the markers, and returns that one, not taken; "" at the end.

        No marker contains another. Only what could still become one is held back.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            end, marker = min(found) if found else (len(self._text), "")
            if not found and not self._is_ended:
                end -= max((_overlap(self._text, self._at, marker) for marker in markers), default=0)
            if end > self._at:
                emit(self.take(end - self._at))
            if found or self._is_ended:
                return marker
            yield

    def keep(self) -> None:
        """From here on remembers what is taken."""
        self._kept = []

    def kept(self) -> str:
        """What was taken since `keep`, and forgets it."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def put_back(self) -> None:
        """What was kept comes again."""
        self.add("")
        self._text = self.kept() + self._text


def _overlap(text: str, start: int, marker: str) -> int:
    """Length of the longest end of text[start:] that the marker begins with."""
    for length in range(min(len(text) - start, len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
