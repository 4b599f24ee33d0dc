"""Logprobs in the shapes of chat, of completions and, for prompts, of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pd_cluster.service.sequence import TokenLogprobs
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Logprobs

_encode = msgspec.json.Encoder().encode
LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM writes this instead


class Entries(NamedTuple):
    """Logprobs of a text's tokens as chats have them, and without the tokens' bytes. Each entry is encoded once."""

    full: list[msgspec.Raw]
    brief: list[msgspec.Raw]


class LogprobsFormat:
    """`as_token_ids` shows tokens as "token_id:5", which distinguishes tokens with the same text."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """{"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}, …]}, …]}."""
        return {
            "content": [
                self._chat_token(entry.token_id, entry.logprobs.logprob)
                | {"top_logprobs": [self._chat_token(token_id, value) for token_id, value in entry.logprobs.top]}
                for entry in entries
                if entry.logprobs is not None
            ]
        }

    def encode(self, entries: Sequence[TokenLogprobs], found: Entries) -> None:
        """Adds the entries, as `chat` has them, to those that were found before."""
        for entry in self.chat(entries)["content"]:
            found.full.append(msgspec.Raw(_encode(entry)))
            for each in (entry, *entry["top_logprobs"]):
                del each["bytes"]
            found.brief.append(msgspec.Raw(_encode(entry)))

    def completion(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        """{tokens, token_logprobs, top_logprobs: [{token: logprob}], text_offset}; null for a prompt's first token."""
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [None if e.logprobs is None else finite(e.logprobs.logprob) for e in entries],
            "top_logprobs": [None if e.logprobs is None else self._top(e.token_id, e.logprobs) for e in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def prompt(self, token_ids: list[int], found: list[Logprobs | None]) -> list[dict[str, Any] | None]:
        """[null, {"<id>": {logprob, rank, decoded_token}, …}, …]: each token itself, then the most likely ones."""
        answer: list[dict[str, Any] | None] = []
        for token_id, logprobs in zip(token_ids, found, strict=False):
            if logprobs is None:
                answer.append(None)
                continue
            ranked = [(token_id, logprobs.logprob, logprobs.rank)]
            ranked += [(other, value, at) for at, (other, value) in enumerate(logprobs.top, 1) if other != token_id]
            answer.append(
                {
                    str(other): {"logprob": finite(value), "rank": rank, "decoded_token": self._decoded(other)}
                    for other, value, rank in ranked
                }
            )
        return answer

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": self._text(token_id), "logprob": finite(logprob), "bytes": list(raw)}

    def _top(self, token_id: int, logprobs: Logprobs) -> dict[str, float]:
        """Returns the chosen token and the most likely ones. The likelier of two tokens with the same text is kept."""
        found = {self._text(token_id): finite(logprobs.logprob)}
        for other, value in logprobs.top:
            found.setdefault(self._text(other), finite(value))
        return found

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        """Decodes a token; bytes that form no character by themselves become U+FFFD."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def behind(entries: list[TokenLogprobs], num_chars: int) -> list[TokenLogprobs]:
    """Returns an answer's logprobs with their offsets in a text that has so many characters before the answer."""
    return [entry._replace(text_offset=entry.text_offset + num_chars) for entry in entries]


def finite(logprob: float) -> float:
    """Returns at least LEAST_LOGPROB, also for NaN."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB
