"""Encodes texts to token ids, long texts on another thread. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pd_cluster.errors import RequestError
from pd_cluster.service.callers.caller import NOBODY, Caller
from pd_cluster.service.concurrency.fair_thread_pool import FairThreadPool
from pd_cluster.text.control_tokens import ControlTokens, PromptText
from pd_cluster.text.tokenizer import Tokenizer

SHORT_NUM_CHARS = 4096  # longer texts are tokenized on another thread, so that no stream waits for them
# A text that may be truncated may have this many characters, or more if the context allows more.
TRUNCATED_NUM_CHARS = 1 << 20
# If a text has more characters than this per token of the context, only that many are tokenized at first.
PROBED_CHARS_PER_TOKEN = 16
PROBE_MARGIN = 2  # a text is too long if its beginning alone has this many times the context's tokens

T = TypeVar("T")


class PromptEncoder:
    """`limit` returns the current size of the context in tokens. Clients take turns with long texts."""

    def __init__(self, tokenizer: Tokenizer, limit: Callable[[], int], control: ControlTokens) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.control = control
        self._pool = FairThreadPool()

    def close(self) -> None:
        self._pool.close()

    async def encode(
        self, texts: list[str], special: bool, may_be_cut: bool, param: str, caller: Caller = NOBODY
    ) -> list[list[int]]:
        """Encodes texts. Raises RequestError, before any work, for a text that cannot fit the context."""
        if texts and not self.tokenizer.has_text:
            raise RequestError(
                f"{param}: a text, but this server has no tokenizer (--skip-tokenizer-init); give token ids",
                param=param,
            )
        for text in texts:
            self.check(len(text), may_be_cut, param)
        limit = self.limit()

        def work() -> list[list[int]]:
            found = []
            for text in texts:
                self._probe(text, limit, may_be_cut, param)
                found.append(self.tokenizer.encode(text, special))
            return found

        return await self.run(work, sum(map(len, texts)), caller)

    async def encode_prompt(
        self, prompt: PromptText, special: bool, may_be_cut: bool, param: str, caller: Caller = NOBODY
    ) -> list[int]:
        """Encodes a prompt that may list its own control tokens."""
        if prompt.own is None:
            (found,) = await self.encode([prompt.text], special, may_be_cut, param, caller)
            return found
        self.check(len(prompt.text), may_be_cut, param)
        limit = self.limit()

        def work() -> list[int]:
            self._probe(prompt.text, limit, may_be_cut, param)
            return self.tokenizer.encode_prompt(prompt, self.control, special)

        return await self._pool.run(caller.client, work, len(prompt.text))

    async def prediction(self, text: str, most_tokens: int, caller: Caller = NOBODY) -> tuple[int, ...]:
        """Encodes as much of a predicted text as fits into `most_tokens` and the context."""
        most_tokens = min(most_tokens, self.limit())
        text = text[: PROBED_CHARS_PER_TOKEN * most_tokens]
        found = await self.run(lambda: self.tokenizer.encode(text, False), len(text), caller)
        return tuple(found[:most_tokens])

    async def bad_words(self, words: list[str], caller: Caller = NOBODY) -> tuple[tuple[int, ...], ...]:
        return await self.run(lambda: self.tokenizer.encode_bad_words(words), sum(map(len, words)), caller)

    async def run(self, work: Callable[[], T], num_chars: int, caller: Caller) -> T:
        """Runs long work on another thread, in the client's turn, and short work at once."""
        if num_chars <= SHORT_NUM_CHARS:
            return work()
        return await self._pool.run(caller.client, work, num_chars)

    def check(self, num_chars: int, may_be_cut: bool, param: str) -> None:
        """Raises RequestError if a text of `num_chars` characters is certainly too long."""
        limit, longest = self.limit(), self.tokenizer.max_chars_per_token
        most = limit * longest
        if may_be_cut and num_chars > (most := max(most, TRUNCATED_NUM_CHARS)):
            raise RequestError(
                f"{param}: {num_chars} characters are too many to tokenize, even with truncate_prompt_tokens; "
                f"send at most {most}",
                param=param,
            )
        if num_chars > most:
            raise RequestError(
                f"{param}: the prompt is too long: {num_chars} characters, at least {-(-num_chars // longest)} "
                f"tokens; this model's maximum context length is {limit} tokens, prompt and output together",
                param=param,
                code="context_length_exceeded",
            )

    def _probe(self, text: str, limit: int, may_be_cut: bool, param: str) -> None:
        """Raises RequestError for a text whose beginning alone is too long, without tokenizing the rest."""
        num_chars = PROBED_CHARS_PER_TOKEN * limit
        if may_be_cut or len(text) <= max(num_chars, SHORT_NUM_CHARS):
            return
        if (num_tokens := len(self.tokenizer.encode(text[:num_chars], False))) > PROBE_MARGIN * limit:
            raise RequestError(
                f"{param}: the prompt is too long: {num_tokens} tokens in the first {num_chars} of its {len(text)} "
                f"characters; this model's maximum context length is {limit} tokens, prompt and output together",
                param=param,
                code="context_length_exceeded",
            )
