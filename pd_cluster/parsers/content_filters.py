"""Filters that leave markup out of content, or blanks out of reasoning, as text arrives.

Each emits text once it is certain, and holds the rest back. Knows nothing of calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pd_cluster.parsers.text_stream import BLANKS, Emit

MOST_BLANKS = 64  # maximum number of blanks that are dropped together with the closing text after them
_CITATION = re.compile(r"<(?:co>|/co:[ 0-9:,\[\]]{0,256}>)")
_BEGUN_CITATION = re.compile(r"<(?:|co?|/(?:|co?|co:[ 0-9:,\[\]]{0,256}))\Z")


class Unpaired:
    """Emits text without closing marks that have no opening mark before them. Paired marks are text."""

    def __init__(self, opens: Sequence[str], closes: Sequence[str], emit: Emit) -> None:
        marks = sorted({*opens, *closes}, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)))
        self._may_begin = re.compile(f"(?:{'|'.join(map(_begun, marks))})\\Z")
        self._closes = closes
        self._emit = emit
        self._is_open = False
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        found = self._may_begin.search(text)
        num_shown = found.start() if found is not None else len(text)
        self._held = text[num_shown:]
        if shown := self._marks.sub(self._shown, text[:num_shown]):
            self._emit(shown)

    def _shown(self, found: re.Match[str]) -> str:
        was_open, self._is_open = self._is_open, found[0] not in self._closes
        return found[0] if was_open or self._is_open else ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Emits the held-back text, because no more content follows directly."""
        if self._held:
            self._emit(self._held)
        self._held = ""


class Unwrapped:
    """Drops the first of `wraps` before content, and the others, with blanks, after it. Emits the rest."""

    def __init__(self, wraps: Sequence[str], emit: Emit) -> None:
        self._before = wraps[0]
        some, ending, may_end = f"[{BLANKS}]{{0,{MOST_BLANKS}}}", "", ""
        for after in reversed(wraps[1:]):
            whole, others = rf"{re.escape(after)}[{BLANKS}]*", "|" if ending else ""
            may_end = f"(?:{_begun(after)}|{whole}{may_end}{others}{may_end})"
            ending = f"(?:{whole}(?:{ending})?{others}{ending})"
        self._may_end = re.compile(rf"{some}{may_end}\Z")  # matches an end of text that may be markup
        self._ends = re.compile(rf"{some}{ending}\Z")
        self._emit = emit
        self._state: Literal["before", "blanks", "within"] = "before"
        self._held = ""

    def add(self, text: str) -> None:
        self._held += text
        if self._state == "before":
            begun = self._held.lstrip(BLANKS)
            if begun != self._before and self._before.startswith(begun):  # the rest of the mark may still arrive
                return
            is_open = begun.startswith(self._before)
            self._held = begun.removeprefix(self._before) if is_open else self._held
            self._state = "blanks" if is_open else "within"
        if self._state == "blanks":
            self._held = self._held.lstrip(BLANKS)
            if not self._held:
                return
            self._state = "within"
        found = self._may_end.search(self._held)
        self._show(found.start() if found is not None else len(self._held))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Emits the held-back text, because no more content follows directly."""
        self._state = "within"
        if (found := self._ends.search(self._held)) is not None:
            self._held = self._held[: found.start()]
        self._show(len(self._held))

    def _show(self, num_chars: int) -> None:
        if num_chars:
            shown, self._held = self._held[:num_chars], self._held[num_chars:]
            self._emit(shown)


class Uncited:
    """Emits text without citation marks, `<co>` and `</co: 0:[1,2]>`."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""

    def add(self, text: str) -> None:
        text = _CITATION.sub("", self._held + text)
        begun = _BEGUN_CITATION.search(text)
        self._held = begun[0] if begun is not None else ""
        if shown := text[: len(text) - len(self._held)]:
            self._emit(shown)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Emits the held-back text at the end."""
        if self._held:
            self._emit(self._held)
        self._held = ""


class Trimmed:
    """Emits text without blanks at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._blanks: list[str] = []

    def add(self, text: str) -> None:
        solid = text.rstrip(BLANKS)
        if solid:
            self._emit("".join([*self._blanks, solid]))
            self._blanks = []
        self._blanks.append(text[len(solid) :])


def _begun(text: str) -> str:
    """Returns a pattern of the text's prefixes, including the empty one."""
    begun = ""
    for char in reversed(text[:-1]):
        begun = f"(?:{re.escape(char)}{begun})?"
    return begun
