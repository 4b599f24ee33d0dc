"""Finds the texts of a model's control tokens, and prevents a client's text from becoming control tokens.

A control token steers the model: it ends a turn, begins a system message, marks a call. In a template's own text it
must be that token; in a client's text it must be plain text. To tell the two apart after rendering, characters of the
client's text are replaced by marks and restored later. Marks are private-use characters, drawn anew for each request.
Knows nothing of tokenizers, conversations or templates.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

# Non-special added tokens such as <table> or <h1>: ordinary text, unless a template also writes them.
_HTML = re.compile(r"</?[a-z]+\d*>")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # tokens for characters that the vocabulary lacks
_BRACKETS = {"<": ">", "[": "]", "{": "}"}
# Supplementary private use, as two ranges: the last two code points of each plane are not characters.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
MAX_DRAWS = 16


class PromptText(NamedTuple):
    """A rendered prompt. `own`: the positions of its control tokens; None: each text of a control token is one."""

    text: str
    own: tuple[tuple[int, int], ...] | None = None


class MarkedChars(NamedTuple):
    """The marks that replace characters while a template is rendered."""

    of: Mapping[str, str]  # character -> its mark
    back: Mapping[str, str]  # mark, also as JSON escapes it -> character

    def undone(self, text: str) -> str:
        for mark, char in self.back.items():
            text = text.replace(mark, char)
        return text


def control_texts(added: Iterable[tuple[str, bool]], known: Collection[str], template: str) -> frozenset[str]:
    """Returns the texts of control tokens among the `added` tokens, which are pairs (text, is special).

    All special tokens are control tokens, and so are other tokens in brackets, but not runs of spaces or added words.
    HTML tags are text unless they are `known` or the template's source contains them. Byte tokens are text.
    """
    return frozenset(
        text
        for text, is_special in added
        if text
        and not _BYTE.fullmatch(text)
        and (
            is_special
            or text in known
            or (_BRACKETS.get(text[0]) == text[-1] and (not _HTML.fullmatch(text) or text in template))
        )
    )


class ControlTokens:
    """Finds and hides the control tokens of one tokenizer; each text is one token."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = frozenset(texts)
        # The characters of each control token that words do not have; empty for a control token that is a word.
        self._signs = {
            text: frozenset(c for c in text if not (c.isalnum() or c.isspace() or c in "_-")) for text in texts
        }

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the longest control token at each position, as tokenizers do."""
        return pattern_of(self.texts)

    @cached_property
    def signs(self) -> frozenset[str]:
        return frozenset().union(*self._signs.values())

    @cached_property
    def _hideable(self) -> list[str]:
        return sorted(self.signs | {text[0] for text, signs in self._signs.items() if not signs})

    def has_signs(self, texts: Iterable[str]) -> bool:
        """Returns whether these texts could form a control token, alone or with the template's text."""
        return any(sign in text for text in texts for sign in self.signs)

    def names_in(self, text: str) -> list[str]:
        return self.pattern.findall(text) if self.texts else []

    def draw_marks(self, texts: Collection[str]) -> MarkedChars | None:
        """Draws marks that occur in none of the texts; None if it finds none."""
        for _ in range(MAX_DRAWS):
            plane = secrets.choice(_PRIVATE)
            first = plane.start + secrets.randbelow(len(plane) - len(self._hideable))
            marks = {char: chr(first + at) for at, char in enumerate(self._hideable)}
            back = {mark: char for char, mark in marks.items()}
            escaped = {json.dumps(mark)[1:-1]: json.dumps(char)[1:-1] for mark, char in back.items()}
            back |= escaped
            if not any(mark in text for text in texts for mark in back):
                return MarkedChars(marks, back)
        return None

    def hidden(self, text: str, marks: MarkedChars, kept: re.Pattern[str] | None = None) -> str:
        """Returns the text with marks inside each whole control token, except those that `kept` matches fully."""
        while True:
            new = self.pattern.sub(lambda found: self._marked(found[0], marks, kept), text)
            if new == text:
                return text
            text = new  # repeated, because two control tokens may have overlapped

    def blurred(self, text: str, marks: MarkedChars, kept: re.Pattern[str] | None = None) -> str:
        """Like `hidden`, but also marks every sign of control tokens, except in tokens that `kept` matches."""
        text = self.hidden(text, marks, kept)
        if kept is None:
            return self._without_signs(text, marks)
        found, at = [], 0
        for match in kept.finditer(text):
            found += [self._without_signs(text[at : match.start()], marks), match[0]]
            at = match.end()
        return "".join([*found, self._without_signs(text[at:], marks)])

    def prompt_of(self, rendered: str, marks: MarkedChars | None) -> PromptText:
        """Restores the rendered text's characters; control tokens without marks are the template's own."""
        parts: list[str] = []
        own: list[tuple[int, int]] = []
        length = 0
        for text, is_own in _split(self.pattern, rendered):
            part = text if is_own or marks is None else marks.undone(text)
            if is_own:
                own.append((length, length + len(part)))
            parts.append(part)
            length += len(part)
        return PromptText("".join(parts), tuple(own))

    def _marked(self, text: str, marks: MarkedChars, kept: re.Pattern[str] | None) -> str:
        if kept is not None and kept.fullmatch(text):
            return text
        return self._without_signs(text, marks) if self._signs[text] else marks.of[text[0]] + text[1:]

    def _without_signs(self, text: str, marks: MarkedChars) -> str:
        for sign in self.signs:
            text = text.replace(sign, marks.of[sign])
        return text


def pattern_of(texts: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern for the longest of the texts; its running time does not depend on their number."""
    return re.compile(_alternatives(sorted(text for text in texts if text)) if any(texts) else "(?!)")


def _alternatives(texts: list[str]) -> str:
    """Builds a trie of sorted texts as a regular expression: one branch per character, longer texts first."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    is_whole = groups.pop("", None) is not None
    branches = []
    for group in groups.values():
        prefix = _common_prefix(group[0], group[-1])
        branches.append(re.escape(prefix) + _alternatives([text[len(prefix) :] for text in group]))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not is_whole else f"(?:{'|'.join(branches)})"
    return joined + "?" * is_whole


def _common_prefix(one: str, other: str) -> str:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return one[:at]


def _split(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
    """Yields the text's parts in order, each with whether the pattern matches it."""
    at = 0
    for found in pattern.finditer(text):
        yield text[at : found.start()], False
        yield found[0], True
        at = found.end()
    yield text[at:], False
