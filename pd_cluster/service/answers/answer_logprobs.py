"""Formats logprobs of chats, of completions and, as vLLM does, of prompts."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pd_cluster.service.generation.text_sequence import TokenLogprobs
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Logprobs

_encode = msgspec.json.Encoder().encode
NPY_PREFIX_NBYTES = 10  # the bytes of a NumPy file before its header
LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM writes this instead


class PromptLogprob(Struct):
    logprob: float
    rank: Annotated[int, Meta(description="The token's rank; 1 is the most likely token.")]
    decoded_token: str


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: Annotated[
        list[int] | UnsetType,
        Meta(description="The bytes of the token's text in UTF-8; a token may be part of a character."),
    ]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[list[int], Meta(description="The start of each token's text, in characters.")]


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Entries(NamedTuple):
    """Logprobs of a text's tokens in the chat format, with and without the tokens' bytes.

    Each entry is encoded once: it is a msgspec.Raw of its type.
    """

    full: list[ChatTokenLogprob]
    brief: list[dict[str, Any]]


class LogprobsFormat:
    """`as_token_ids` shows tokens as "token_id:5", which distinguishes tokens with the same text.

    `tells_chosen`: a chat also lists the chosen token among the most likely ones.
    """

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool = False, tells_chosen: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self.tells_chosen = tells_chosen

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatTokenLogprob(
                    self._text(entry.token_id),
                    finite(entry.logprobs.logprob),
                    list(self._tokenizer.token_bytes(entry.token_id)),
                    [
                        TokenLogprob(self._text(token_id), finite(value), list(self._tokenizer.token_bytes(token_id)))
                        for token_id, value in self._others(entry.token_id, entry.logprobs)
                    ],
                )
                for entry in entries
                if entry.logprobs is not None
            ]
        )

    def _others(self, token_id: int, logprobs: Logprobs) -> list[tuple[int, float]]:
        if self.tells_chosen and all(other != token_id for other, _ in logprobs.top):
            return [(token_id, logprobs.logprob), *logprobs.top]
        return logprobs.top

    def encode(self, entries: Sequence[TokenLogprobs], found: Entries) -> None:
        """Appends entries in the chat format to `found`."""
        for entry in self.chat(entries).content:
            found.full.append(cast(ChatTokenLogprob, msgspec.Raw(_encode(entry))))
            for each in (entry, *entry.top_logprobs):
                each.bytes = UNSET
            found.brief.append(cast(dict[str, Any], msgspec.Raw(_encode(entry))))

    def completion(self, entries: list[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the logprobs of completions; a prompt's first token has none."""
        return CompletionLogprobs(
            tokens=[self._text(entry.token_id) for entry in entries],
            token_logprobs=[None if e.logprobs is None else finite(e.logprobs.logprob) for e in entries],
            top_logprobs=[None if e.logprobs is None else self._top(e.token_id, e.logprobs) for e in entries],
            text_offset=[entry.text_offset for entry in entries],
        )

    def prompt(self, token_ids: list[int], found: list[Logprobs | None]) -> PromptLogprobs:
        """Returns, for each prompt token, token id -> logprob: its own first, then those of the most likely tokens."""
        answer: PromptLogprobs = []
        for token_id, logprobs in zip(token_ids, found, strict=False):
            if logprobs is None:
                answer.append(None)
                continue
            ranked = [(token_id, logprobs.logprob, logprobs.rank)]
            ranked += [(other, value, at) for at, (other, value) in enumerate(logprobs.top, 1) if other != token_id]
            answer.append(
                {str(other): PromptLogprob(finite(value), rank, self._decoded(other)) for other, value, rank in ranked}
            )
        return answer

    def _top(self, token_id: int, logprobs: Logprobs) -> dict[str, float]:
        """Returns the chosen and the most likely tokens. Keeps the likelier of two tokens with the same text."""
        found = {self._text(token_id): finite(logprobs.logprob)}
        for other, value in logprobs.top:
            found.setdefault(self._text(other), finite(value))
        return found

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        """Decodes a token; bytes that are not a whole character become U+FFFD."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def npy_base64(rows: Sequence[Sequence[float]]) -> str:
    """Returns a NumPy file (format 1.0) of float32 [num_rows, length of the longest row]; -inf pads shorter rows."""
    width = max(map(len, rows))
    values = array("f", [value for row in rows for value in (*row, *[-math.inf] * (width - len(row)))])
    if sys.byteorder == "big":
        values.byteswap()
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(rows)}, {width}), }}"
    padded = header.ljust(-(-(len(header) + NPY_PREFIX_NBYTES + 1) // 64) * 64 - NPY_PREFIX_NBYTES - 1) + "\n"
    magic = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little")
    return base64.b64encode(magic + padded.encode() + values.tobytes()).decode()


def behind(entries: list[TokenLogprobs], num_chars: int) -> list[TokenLogprobs]:
    """Returns an answer's logprobs, with offsets shifted by the length of the text before the answer."""
    return [entry._replace(text_offset=entry.text_offset + num_chars) for entry in entries]


def finite(logprob: float) -> float:
    """Returns the logprob, but at least LEAST_LOGPROB, which also replaces NaN."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB
