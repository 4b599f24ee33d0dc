"""Texts to token ids, on a thread where it takes a while. Knows nothing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pd_cluster.errors import RequestError
from pd_cluster.text import Tokenizer

SHORT_NUM_CHARS = 4096  # longer texts are tokenized on a thread, so that no stream waits for them
TRUNCATED_NUM_CHARS = 1 << 20  # a text that will be cut down to the context may be longer than it, up to this


class PromptEncoder:
    """`limit` tells how many tokens the context has by now."""

    def __init__(self, tokenizer: Tokenizer, limit: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._limit = limit

    async def encode(self, texts: list[str], special: bool, may_be_cut: bool, param: str) -> list[list[int]]:
        """Raises RequestError, before any work, for a text that cannot fit the context."""
        if texts and not self._tokenizer.has_text:
            raise RequestError(
                f"{param}: a text, and there is no tokenizer (--skip-tokenizer-init); give token ids", param=param
            )
        for text in texts:
            self.check(len(text), may_be_cut, param)
        if sum(map(len, texts)) <= SHORT_NUM_CHARS:
            return self._encode(texts, special)
        return await asyncio.to_thread(self._encode, texts, special)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, special) for text in texts]

    async def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        if sum(map(len, words)) <= SHORT_NUM_CHARS:
            return self._tokenizer.encode_bad_words(words)
        return await asyncio.to_thread(self._tokenizer.encode_bad_words, words)

    def check(self, num_chars: int, may_be_cut: bool, param: str) -> None:
        """Raises RequestError for so many characters, whatever they are."""
        limit, longest = self._limit(), self._tokenizer.max_chars_per_token
        most = limit * longest
        if may_be_cut and num_chars > (most := max(most, TRUNCATED_NUM_CHARS)):
            raise RequestError(
                f"{param}: {num_chars} characters are too many to tokenize, even for truncate_prompt_tokens; "
                f"send at most {most}",
                param=param,
            )
        if num_chars > most:
            raise RequestError(
                f"{param}: the prompt is too long: {num_chars} characters; this model's maximum context length is "
                f"{limit} tokens, of at most {longest} characters",
                param=param,
                code="context_length_exceeded",
            )
