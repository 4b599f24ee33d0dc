"""Text that arrives in pieces, for readers that are written as if the text were complete.

A reader is a generator: it yields when it needs more text, and resumes when text has arrived or ended. Its result
therefore does not depend on how the text was split. Knows nothing of the text's meaning.
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
MOST_BLANKS = 64  # maximum number of blanks that are skipped to look at the next character


def ignore(text: str) -> None:
    """Discards the text."""


class TextStream:
    """A growing text. Examines each character a bounded number of times, however small the pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # the position up to which text was taken
        self._kept: list[str] | None = None
        self._num_kept = 0  # the number of characters taken since `keep`
        self._record: list[str] | None = None
        self._is_ended = False

    # ---- for writers

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._is_ended = True

    @property
    def num_held(self) -> int:
        """The number of characters at the end that readers have not taken, or may put back."""
        return len(self._text) - self._at + (self._num_kept if self._kept is not None else 0)

    # ---- for readers

    def peek(self) -> Steps[str]:
        """Returns the next character without taking it; "" at the end."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def peek_past(self, num_chars: int) -> Steps[str]:
        """Returns the character after `num_chars` characters and any blanks; "" at the end, or after many blanks."""
        while True:
            at = self._at + num_chars
            run = BLANK_RUN.match(self._text, at, at + MOST_BLANKS)
            end = run.end() if run is not None else at
            if end < min(len(self._text), at + MOST_BLANKS):
                return self._text[end]
            if self._is_ended or end == at + MOST_BLANKS:
                return ""
            yield

    def begins(self, text: str) -> Steps[bool]:
        """Returns whether this text comes next."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                return True
            if self._is_ended or not text.startswith(here):
                return False
            yield

    def comes_or_is_cut(self, text: str) -> Steps[bool]:
        """Takes this text, or a prefix of it at the end. Returns False, and takes nothing, for any other text."""
        if not (yield from self.begins(text)) and not text.startswith(self._text[self._at :]):
            return False
        self.take(len(text))
        return True

    def take(self, num_chars: int) -> str:
        """Takes this many characters; the caller must know that they have arrived."""
        taken = self._text[self._at : self._at + num_chars]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
            self._num_kept += len(taken)
        if self._record is not None:
            self._record.append(taken)
        return taken

    def take_pair(self) -> Steps[str]:
        """Takes two characters, fewer at the end."""
        while len(self._text) < self._at + 2 and not self._is_ended:
            yield
        return self.take(2)

    def run(self, pattern: re.Pattern[str], emit: Emit = ignore) -> Steps[None]:
        """Takes the longest text that matches the pattern, a repeated character class."""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None or match.end() == self._at:
                return
            emit(self.take(match.end() - self._at))

    def blanks(self) -> Steps[None]:
        yield from self.run(BLANK_RUN)

    def until(self, markers: Sequence[str], emit: Emit, drops_cut: bool = False) -> Steps[str]:
        """Takes the text before the first of the markers, but not the marker. Returns the marker; "" at the end.

        No marker contains another. Holds back only text that may become a marker. `drops_cut`: drops part of a marker
        at the end.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            end, marker = min(found) if found else (len(self._text), "")
            if not found and (drops_cut or not self._is_ended):
                end -= max((_overlap(self._text, self._at, marker) for marker in markers), default=0)
            if end > self._at:
                emit(self.take(end - self._at))
            if found or self._is_ended:
                self.take(0 if found else len(self._text) - self._at)
                return marker
            yield

    def short_until(self, markers: str | Sequence[str], most: int, emit: Emit) -> Steps[str]:
        """Like `until` if a marker comes within `most` characters; otherwise takes nothing and returns ""."""
        markers = (markers,) if isinstance(markers, str) else markers
        longest = max(map(len, markers))
        while True:
            found = [
                (at, marker)
                for marker in markers
                if (at := self._text.find(marker, self._at, self._at + most + longest)) >= 0
            ]
            if found:
                end, marker = min(found)
                if self._is_ended or end + longest <= len(self._text) or len(found) == len(markers):
                    emit(self.take(end - self._at))
                    return marker
            elif self._is_ended or len(self._text) - self._at >= most + longest:
                return ""
            yield

    def ends_within(self, num_chars: int) -> Steps[bool]:
        """Returns whether the text ends within this many characters."""
        while len(self._text) - self._at <= num_chars:
            if self._is_ended:
                return True
            yield
        return False

    def begins_after_blanks(self, text: str) -> Steps[bool]:
        """Returns whether this text comes next, perhaps after blanks; if so, takes these. Ends an earlier `keep`."""
        self.keep()
        yield from self.blanks()
        found = yield from self.begins(text)
        if found:
            self.kept()
        else:
            self.put_back()
        return found

    def take_after_blanks(self, text: str) -> Steps[bool]:
        """Takes blanks and this text, or a prefix of it at the end; otherwise takes nothing. Ends an earlier `keep`."""
        return (yield from self.take_after_run(BLANK_RUN, text))

    def take_after_run(self, pattern: re.Pattern[str], text: str) -> Steps[bool]:
        """Like `take_after_blanks`, but after a run of this pattern."""
        self.keep()
        yield from self.run(pattern)
        is_next = yield from self.comes_or_is_cut(text)
        if is_next:
            self.kept()
        else:
            self.put_back()
        return is_next

    def keep(self) -> None:
        """Starts keeping the text taken."""
        self._kept, self._num_kept = [], 0

    def kept(self) -> str:
        """Returns the text taken since `keep`, and stops keeping."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def put_back(self) -> None:
        """Puts back the text taken since `keep`."""
        kept = self.kept()
        num_more = len(kept)
        while self._record and num_more:
            last = self._record.pop()
            if len(last) > num_more:
                self._record.append(last[:-num_more])
            num_more -= min(len(last), num_more)
        if len(kept) > self._at:  # the buffer no longer has all of it
            self._text, self._at = kept + self._text[self._at :], 0
        else:
            self._at -= len(kept)

    def record(self) -> None:
        """Starts recording the text taken, independent of `keep`."""
        self._record = []

    def recorded(self) -> str:
        """Returns the text taken since `record`, without text that was put back, and stops recording."""
        record, self._record = self._record or [], None
        return "".join(record)


def without_cut(text: str, markers: Sequence[str]) -> str:
    """Returns the text without a marker's prefix at its end."""
    return text[: len(text) - max((_overlap(text, 0, marker) for marker in markers), default=0)]


def _overlap(text: str, start: int, marker: str) -> int:
    """Returns the length of the longest suffix of text[start:] that is a prefix of the marker."""
    for length in range(min(len(text) - start, len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
