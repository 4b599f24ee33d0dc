"""Text in, text out, over the router: tokenizing, limits, detokenizing, stop strings, usage. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import reprlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster.api.protocol import ChatCompletionRequest, GenerationRequest
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.router import Router
from pd_cluster.errors import ModelNotFound, RequestError
from pd_cluster.text import StopStrings, Tokenizer
from pd_cluster.types import FinishReason, SamplingParams

DEFAULT_MAX_TOKENS = 16  # completions and /generate; chat may fill the context
MESSAGE_NUM_CHARS = 8  # what a template adds to each further message, at the least
SHORT_NUM_CHARS = 4096  # longer texts are tokenized on a thread, so that no stream waits for them


class Piece(NamedTuple):
    """New text, and the tokens that came since the last piece."""

    text: str
    token_ids: list[int]


@dataclass(slots=True)
class Generation:
    """One request as it goes along: what it asked, how far it is, who serves it."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    stops: list[str]
    skip_special_tokens: bool
    every_token: bool = False  # a piece for each token, even when there is no text yet
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    served_by: list[str] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, int]:
        num_prompt = len(self.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": num_prompt + self.num_output_tokens,
        }


class TextService:
    def __init__(
        self,
        router: Router,
        checkpoint: Checkpoint,
        model: str,
        served_model_names: list[str],
        max_model_len: int,
        seed: int | None = None,
    ) -> None:
        self.router = router
        self.tokenizer = Tokenizer(checkpoint.path)
        self.model = model
        self._seeds = secrets.SystemRandom() if seed is None else random.Random(seed)
        self.served_model_names = served_model_names or [model]
        self._max_model_len = max_model_len
        self._vocab_size = int(checkpoint.config.get("vocab_size", self.tokenizer.vocab_size))
        known = ("temperature", "top_p", "top_k")
        self._sampling_defaults = {
            k: v for k, v in checkpoint.generation_config.items() if k in known and v is not None
        }

    @property
    def max_model_len(self) -> int:
        """The smallest of this process's limit and those of the workers that answer."""
        infos = [i.info for i in self.router.membership.instances if i.is_ready and i.info is not None]
        return min([self._max_model_len, *(info.max_model_len for info in infos)])

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFound."""
        if name is None or name in (*self.served_model_names, self.model):
            return name or self.served_model_names[0]
        raise ModelNotFound(
            f"the model {reprlib.repr(name)} does not exist here; this server has {', '.join(self.served_model_names)}",
            param="model",
            code="model_not_found",
        )

    async def chat(self, request: ChatCompletionRequest) -> Generation:
        messages = [message.to_template(at) for at, message in enumerate(request.messages)]
        num_chars = sum(len(message.get("content", "")) for message in messages)
        num_chars += MESSAGE_NUM_CHARS * (len(messages) - 1)
        token_ids = await self._tokenize(
            lambda: self.tokenizer.encode_chat(
                messages, request.add_generation_prompt, request.chat_template_kwargs or {}
            ),
            num_chars,
            "messages",
        )
        return self._generation(request, token_ids, None, "messages")

    async def completion(self, request: GenerationRequest, prompt: str | list[int], special: bool = True) -> Generation:
        if isinstance(prompt, str):
            token_ids = await self._tokenize(lambda: self.tokenizer.encode(prompt, special), len(prompt), "prompt")
        else:
            token_ids = prompt
        return self._generation(request, token_ids, DEFAULT_MAX_TOKENS, "prompt")

    async def _tokenize(self, encode: Callable[[], list[int]], num_chars: int, param: str) -> list[int]:
        """Raises RequestError, before any work, for a text that cannot fit the context."""
        if num_chars > self.max_model_len * self.tokenizer.max_chars_per_token:
            raise RequestError(
                f"{param}: {num_chars} characters; the model's context is {self.max_model_len} tokens of at most "
                f"{self.tokenizer.max_chars_per_token} characters",
                param=param,
                code="context_length_exceeded",
            )
        return encode() if num_chars <= SHORT_NUM_CHARS else await asyncio.to_thread(encode)

    def _generation(
        self, request: GenerationRequest, token_ids: list[int], default_max_tokens: int | None, param: str
    ) -> Generation:
        """Checks the limits. Raises RequestError."""
        limit = self.max_model_len
        num_prompt = len(token_ids)
        if not num_prompt:
            raise RequestError(f"{param}: no tokens", param=param)
        if num_prompt >= limit:
            raise RequestError(
                f"{param}: {num_prompt} tokens; the model's context is {limit} tokens, prompt and output together",
                param=param,
                code="context_length_exceeded",
            )
        if not all(0 <= i < self._vocab_size for i in token_ids):
            raise RequestError(f"{param}: token ids must be in 0 to {self._vocab_size - 1}", param=param)
        wanted = request.wanted_tokens
        if wanted is not None and wanted < (0 if getattr(request, "echo", False) else 1):
            raise RequestError(f"max_tokens: {wanted}; must be at least 1 (0 only with echo)", param="max_tokens")
        if wanted is None:
            room = limit - num_prompt
            wanted = room if default_max_tokens is None else min(default_max_tokens, room)
        if num_prompt + wanted > limit:
            raise RequestError(
                f"max_tokens: {num_prompt} prompt tokens and {wanted} output tokens exceed the model's context of "
                f"{limit} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        sampling = request.sampling(wanted, self._seeds.getrandbits(63), self._sampling_defaults)
        return Generation(token_ids, sampling, request.stops(), request.skip_special_tokens, request.return_token_ids)

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """A piece whenever there is text, and a last one; then `generation.finish_reason` is set. Closing it aborts."""
        if generation.sampling.max_tokens == 0:  # echo only
            generation.finish_reason = "length"
            return
        detokenizer = self.tokenizer.detokenizer(generation.skip_special_tokens)
        stops = StopStrings(generation.stops)

        def routed(prefill: Instance, decode: Instance) -> None:
            generation.served_by = [prefill.name, decode.name]

        serving = self.router.serve(generation.prompt_token_ids, generation.sampling, routed)
        token_ids: list[int] = []
        async with contextlib.aclosing(serving) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                generation.num_output_tokens += 1
                token_ids.append(token.token_id)
                generation.finish_reason = token.finish_reason
                text = "" if _ends_invisibly(token.finish_reason, generation) else detokenizer.add(token.token_id)
                if token.finish_reason is not None:
                    text += detokenizer.finish()
                text = stops.add(text)
                if stops.matched is not None:
                    generation.finish_reason = "stop"
                elif token.finish_reason is not None:
                    text += stops.finish()
                if text or generation.every_token or generation.finish_reason is not None:
                    yield Piece(text, token_ids)
                    token_ids = []
                if generation.finish_reason is not None:
                    return

    async def complete(self, generation: Generation) -> Piece:
        """Everything at once."""
        async with contextlib.aclosing(self.stream(generation)) as stream:  # type: ignore[type-var]
            pieces = [piece async for piece in stream]
        return Piece("".join(p.text for p in pieces), [token for p in pieces for token in p.token_ids])


def _ends_invisibly(reason: FinishReason | None, generation: Generation) -> bool:
    """A stop token is not part of the answer's text; it is shown only when special tokens are asked for."""
    return reason == "stop" and generation.skip_special_tokens
