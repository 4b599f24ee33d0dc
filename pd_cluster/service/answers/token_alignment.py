"""Finds the tokens of each part of a reply's text, for its logprobs. Knows nothing of HTTP or of the form of marks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pd_cluster.parsers.reply_parts import Content, Part, Reasoning
from pd_cluster.service.generation.text_sequence import Piece, TokenLogprobs


@dataclass(slots=True)
class _Written:
    """A span of text and the token that completed it, preceded by any tokens that wrote only the first bytes of its
    first character.

    It begins at `start`, in characters of the reply, and ends where the next span begins.
    """

    entries: list[TokenLogprobs]
    start: int
    is_given: bool = False


class TokenAlignment:
    """Yields the text of one choice token by token, and returns the tokens of each part of content.

    Content never gets tokens of marks, reasoning or calls, or a final token without text. A token belongs to the first
    part that has a character of its text.
    """

    def __init__(self, shows_stop_token: bool = False) -> None:
        """`shows_stop_token`: the token that ends the answer is part of its text."""
        self._shows_stop_token = shows_stop_token
        self._num_chars = 0  # of text that `cut` has yielded
        self._coming: deque[TokenLogprobs] = deque()  # tokens whose text was not yielded yet
        self._text = ""  # the end of the yielded text, which belongs to no part yet
        self._open: deque[_Written] = deque()  # its spans

    def cut(self, piece: Piece) -> Iterator[str]:
        """Yields the piece's text, split where tokens begin."""
        coming, text = self._coming, piece.text
        coming += piece.logprobs
        is_stop_token = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
        if is_stop_token and not self._shows_stop_token and coming:
            coming.pop()
        start, end = self._num_chars, self._num_chars + len(text)
        while start < end:
            begun = []
            while coming and coming[0].text_offset <= start:
                begun.append(coming.popleft())
            until = min(coming[0].text_offset, end) if coming else end
            if begun:
                self._open.append(_Written(begun, start))
            self._num_chars = until
            shown = text[start - end : until - end or None]
            self._text += shown
            yield shown
            start = until

    def of(self, parts: list[Part], num_held: int = 0) -> list[list[TokenLogprobs]]:
        """Returns the tokens of each part that the last text completed; only content has any.

        `num_held`: characters at the end of the text that the reader holds back.
        """
        if not parts:
            return []
        found: list[list[TokenLogprobs]] = []
        at, end = 0, max(len(self._text) - num_held, 0)
        for index, part in enumerate(parts):
            text = part.text if isinstance(part, Content | Reasoning) else ""  # the text of calls is rewritten
            is_last = index == len(parts) - 1
            spans = _places(self._text, text, at, end, from_the_end=is_last) if text else []
            found.append(self._tokens_at(spans) if isinstance(part, Content) else [])
            at = spans[-1][1] if spans else at
        self._text = self._text[end:]
        begin = self._num_chars - len(self._text)
        while len(self._open) > 1 and self._open[1].start <= begin:
            self._open.popleft()
        return found

    def _tokens_at(self, spans: list[tuple[int, int]]) -> list[TokenLogprobs]:
        """Returns the tokens that have characters in these spans of the open text, and belong to no part yet."""
        found: list[TokenLogprobs] = []
        begin = self._num_chars - len(self._text)
        ends = [*(each.start for each in self._open), self._num_chars][1:]
        for each, end in zip(self._open, ends, strict=True):
            if not each.is_given and any(each.start < begin + b and begin + a < end for a, b in spans):
                each.is_given = True
                found += each.entries
        return found


def _places(text: str, part: str, start: int, end: int, from_the_end: bool) -> list[tuple[int, int]]:
    """Returns the spans of the part's characters in text[start:end], in order.

    There are several spans if marks lie in between. Characters that the reader added are in no span.
    """
    if from_the_end and text.endswith(part, start, end):
        return [(end - len(part), end)]
    at = text.rfind(part, start, end) if from_the_end else text.find(part, start, end)
    if at >= 0:
        return [(at, at + len(part))]
    places: list[tuple[int, int]] = []
    while part and (at := text.rfind(part[-1], start, end)) < 0:
        part = part[:-1]
    while part:
        num_same = 0
        while num_same < len(part) and at >= start + num_same and text[at - num_same] == part[-1 - num_same]:
            num_same += 1
        places.append((at + 1 - num_same, at + 1))
        part, end = part[: len(part) - num_same], at + 1 - num_same
        while part and (at := text.rfind(part[-1], start, end)) < 0:
            part = part[:-1]
    return places[::-1]
