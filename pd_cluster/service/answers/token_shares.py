"""Which tokens wrote which text of a reply, for its logprobs. Knows nothing of HTTP, nor of how marks look."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pd_cluster.parsers.parts import Content, Part
from pd_cluster.service.sequence import Piece, TokenLogprobs


class TokenShares:
    """Hands out the text of one choice token by token, and tells for each part of content which tokens wrote it.

    Marks, reasoning and calls have tokens of their own, which no content gets; neither does a token without text that
    ends the answer.
    """

    def __init__(self) -> None:
        self._num_chars = 0  # of text that was handed out
        self._coming: deque[TokenLogprobs] = deque()  # tokens whose text was not
        self._open: deque[tuple[TokenLogprobs, int]] = deque()  # and their characters; read, and part of nothing yet

    def cut(self, piece: Piece) -> Iterator[str]:
        """Yields the piece's text, cut where tokens begin."""
        coming, text = self._coming, piece.text
        coming += piece.logprobs
        start, end = self._num_chars, self._num_chars + len(text)
        while start < end:
            begun = []
            while coming and coming[0].text_offset <= start:
                begun.append(coming.popleft())
            until = min(coming[0].text_offset, end) if coming else end
            self._open += [(entry, 0) for entry in begun[:-1]]
            self._open += [(entry, until - start) for entry in begun[-1:]]
            self._num_chars = until
            yield text[start - end : until - end or None]
            start = until

    def of(self, parts: list[Part]) -> list[list[TokenLogprobs]]:
        """Returns the tokens of each part that the last text completed; only content has any."""
        found = []
        for at, part in enumerate(parts):
            is_last = at == len(parts) - 1
            found.append(self._take(len(part.text), is_last) if isinstance(part, Content) else [])
        if parts:
            self._open.clear()
        return found

    def _take(self, num_chars: int, from_the_end: bool) -> list[TokenLogprobs]:
        """Takes the tokens of so many characters: the last ones that were read, or the first ones."""
        found: deque[TokenLogprobs] = deque()
        while self._open and num_chars > 0:
            entry, length = self._open.pop() if from_the_end else self._open.popleft()
            found.appendleft(entry) if from_the_end else found.append(entry)
            num_chars -= length
        while from_the_end and found and self._open and not self._open[-1][1]:
            found.appendleft(self._open.pop()[0])  # the first bytes of the character that these tokens begin with
        return list(found)
