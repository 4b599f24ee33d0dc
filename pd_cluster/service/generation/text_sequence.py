"""Turns the tokens of one sequence of an answer into final text, until it ends. Knows nothing of HTTP or other
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pd_cluster.text.detokenizer import Detokenizer
from pd_cluster.text.stop_strings import StopStrings
from pd_cluster.types import DraftReport, FinishReason, Logprobs, TokenOutput


class TokenLogprobs(NamedTuple):
    """`logprobs` is None for a prompt's first token, and if only text offsets are needed. `text_offset`: characters of
    the text before the token.
    """

    token_id: int
    logprobs: Logprobs | None
    text_offset: int


class Piece(msgspec.Struct, frozen=True):
    """New text of one choice, and its tokens since the previous piece. The last piece has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # of these tokens, when requested
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended the choice


@dataclass(slots=True)
class TextSequence:
    """`shows_stop_token`: whether a token that ends the answer is part of its text.

    `keeps_places`: pieces have the text offset of each token even without logprobs.
    """

    index: int
    detokenizer: Detokenizer
    stops: StopStrings
    min_tokens: int = 0
    shows_stop_token: bool = False
    keeps_places: bool = False
    num_tokens: int = 0
    num_chars: int = 0  # of text, including text that is held back
    cumulative_logprob: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()  # reported as a stop_reason
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_accepted: int = 0  # accepted draft tokens of the request's prediction
    num_rejected: int = 0
    draft_steps: list[tuple[int, int]] = field(default_factory=list)  # reported steps; see DraftReport
    token_ids: list[int] = field(default_factory=list)  # since the last piece
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, token: TokenOutput) -> str:
        """Adds a token; returns the text that is final now. If this sets `finish_reason`, the token was the last."""
        self.num_tokens += 1
        if token.drafts is not None:
            self.note_drafts(token.drafts)
        self.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self.cumulative_logprob += token.logprobs.logprob
        if token.logprobs is not None or self.keeps_places:
            self.logprobs.append(TokenLogprobs(token.token_id, token.logprobs, self.num_chars))
        self.finish_reason = token.finish_reason
        is_hidden = token.finish_reason == "stop" and not self.shows_stop_token
        text = "" if is_hidden else self.detokenizer.add(token.token_id)
        if token.finish_reason is not None:
            text += self.detokenizer.finish()
        self.num_chars += len(text)
        # As for end-of-sequence tokens, the token after min_tokens is the first that may end the answer.
        text = self.stops.add(text, may_match=self.num_tokens > self.min_tokens)
        if token.finish_reason == "stop" and token.token_id in self.stop_token_ids:
            self.stop_reason = token.token_id
        if self.stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.stops.matched
        elif token.finish_reason is not None:
            text += self.stops.finish()
        return text

    def end(self, finish_reason: FinishReason) -> str:
        """Ends the sequence without a token. Returns the text of a character that the prompt left incomplete."""
        self.finish_reason = finish_reason
        return self.detokenizer.finish()

    def add_all(self, tokens: list[TokenOutput]) -> str:
        """Returns the joined texts of `add` for all tokens. No stop string may end the answer within these tokens."""
        if tokens[0].logprobs is not None or self.keeps_places:  # each token records the text before it
            return "".join(self.add(each) for token in tokens for each in token.apart())
        *before, last = tokens
        for token in before:
            if token.drafts is not None:
                self.note_drafts(token.drafts)
        token_ids = [token_id for token in before for token_id in (*token.earlier, token.token_id)]
        token_ids += last.earlier
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        text = self.detokenizer.add_all(token_ids)
        self.num_chars += len(text)
        return text + self.add(last)

    def note_drafts(self, report: DraftReport, num_dropped: int = 0) -> None:
        """Adds a report. `num_dropped`: tokens that came with it but are not part of the answer; the last of these
        is not a draft.
        """
        self.num_accepted += max(0, report.num_accepted - max(0, num_dropped - 1))
        self.num_rejected += report.num_rejected
        self.draft_steps += report.steps

    def piece(self, text: str, index: int) -> Piece:
        """Returns a piece with this text and the tokens since the last piece. `index`: the choice's number."""
        piece = Piece(index, text, self.token_ids, self.logprobs, self.finish_reason, self.stop_reason)
        self.token_ids, self.logprobs = [], []
        return piece

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(self.num_tokens, 1)


def joined(pieces: list[Piece]) -> Piece:
    """Joins all pieces of one sequence."""
    return Piece(
        pieces[-1].index,
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [entry for piece in pieces for entry in piece.logprobs],
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
    )
