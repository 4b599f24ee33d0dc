"""Logs requests and their answers, if an operator enables it.

A line contains no prompt, and no text from a client except the request's name. Answers are cut, and keys of common
forms are hidden.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

import msgspec

from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.settings.redaction import redacted
from pd_cluster.settings.request_log_settings import RequestLogSettings
from pd_cluster.types import Sampling

log = logging.getLogger(__name__)

KEY_NUM_CHARS = 256  # characters kept beyond the cut, so that a key at the cut is still recognized


class _Answer:
    """One choice's text so far, as much as the log shows."""

    def __init__(self) -> None:
        self.text = ""
        self.num_chars = self.num_tokens = 0
        self.finish_reason = ""

    def add(self, piece: Piece, most: int) -> None:
        self.text += piece.text[: max(0, most - len(self.text))]
        self.num_chars += len(piece.text)
        self.num_tokens += len(piece.token_ids)
        self.finish_reason = piece.finish_reason or ""


class RequestLog:
    def __init__(self, settings: RequestLogSettings) -> None:
        self._has_outputs, self._most = settings.has_outputs, settings.most_chars

    def begins(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            told = "".join(f", {name} {value}" for name, value in _numbers(generation.sampling))
            kind = "to be pooled" if generation.order.pooling is not None else "in the prompt"
            log.info("request %s: %d tokens %s%s", generation.client_id, len(generation.prompt_token_ids), kind, told)

    def ends(self, generations: Sequence[Generation], pieces: Sequence[Piece]) -> None:
        """Logs whole answers, one piece for each choice."""
        if self._has_outputs:
            for piece in pieces:
                answer = _Answer()
                answer.add(piece, self._most + KEY_NUM_CHARS)
                self._tell(generations, piece.index, answer)

    def watched(
        self, generations: Sequence[Generation], pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        """Yields the pieces, and logs each choice when it has ended. Closing this closes `pieces`."""
        self.begins(generations)
        return self._watched(generations, pieces) if self._has_outputs else pieces

    async def _watched(
        self, generations: Sequence[Generation], pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        answers: dict[int, _Answer] = {}
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    answer = answers.setdefault(piece.index, _Answer())
                    answer.add(piece, self._most + KEY_NUM_CHARS)
                    if piece.finish_reason is not None:
                        self._tell(generations, piece.index, answers.pop(piece.index))
                    yield piece
        finally:
            for index, answer in answers.items():  # unfinished answers: the client left, or the request failed
                self._tell(generations, index, answer)

    def _tell(self, generations: Sequence[Generation], index: int, answer: _Answer) -> None:
        shown = redacted(answer.text)[: self._most]
        num_more = answer.num_chars - min(answer.num_chars, self._most)
        log.info(
            "request %s, choice %d: %s after %d tokens: %r%s",
            generations[0].client_id,
            index,
            answer.finish_reason or "broken off",
            answer.num_tokens,
            shown,
            f" and {num_more} characters more" if num_more else "",
        )


def _numbers(sampling: Sampling) -> list[tuple[str, int | float]]:
    """Returns the numeric parameters that differ from the defaults; text parameters would show a client's text."""
    usual = {each.name: each.default for each in msgspec.structs.fields(Sampling)}
    given = ((name, getattr(sampling, name)) for name in sampling.__struct_fields__)
    return [(name, value) for name, value in given if isinstance(value, int | float) and value != usual[name]]
