"""Text in, text out, over the router: tokenizing, limits, detokenizing, stop strings, usage. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import reprlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pd_cluster.api.chat_protocol import ChatCompletionRequest, ChatFields
from pd_cluster.api.guide_check import GuideCheck
from pd_cluster.api.guide_fields import guide_of
from pd_cluster.api.limits import DEFAULT_MAX_LOGPROBS, Limits, truncated
from pd_cluster.api.protocol import MAX_SEQUENCES, GenerationRequest
from pd_cluster.api.sequence import Piece, Sequence, joined
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.router import Router
from pd_cluster.cluster.stream import Stream
from pd_cluster.errors import GuideError, ModelNotFound, RequestError
from pd_cluster.text import StopStrings, Tokenizer
from pd_cluster.types import Logprobs, PromptOutput, SamplingParams, TokenOutput

DEFAULT_MAX_TOKENS = 16  # completions and /generate; chat may fill the context
MESSAGE_NUM_CHARS = 8  # what a template adds to each further message, at the least
SHORT_NUM_CHARS = 4096  # longer texts are tokenized on a thread, so that no stream waits for them
TRUNCATED_NUM_CHARS = 1 << 20  # a text that will be cut down to the context may be longer than it, up to this


def _stop_nothing(index: int) -> None:
    """Until a request is on its way there is nothing to stop."""


@dataclass(slots=True)
class Generation:
    """One request as it goes along: what it asked, how far its sequences are, who serves it."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    sequences: list[Sequence]
    num_choices: int  # of the sequences, the best ones are the answer
    every_token: bool = False  # a piece for each token, even when there is no text yet
    is_prompt_only: bool = False  # max_tokens 0, with echo
    cache_salt: str = ""
    session: str = ""  # requests of one session like to meet the same caches
    priority: int = 0
    prompt: PromptOutput | None = None  # known no later than the first piece
    served_by: list[str] = field(default_factory=list)
    stop: Callable[[int], None] = _stop_nothing
    client_id: str = ""  # what the answer calls itself
    received_s: float | None = None

    @property
    def usage(self) -> dict[str, Any]:
        """Of the sequences that are answered; cached tokens as soon as they are known."""
        num_prompt = len(self.prompt_token_ids)
        num_output = sum(sequence.num_tokens for sequence in self.sequences)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        if self.prompt is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.prompt.num_cached_tokens}
        return usage

    @property
    def prompt_logprobs(self) -> list[Logprobs | None]:
        return self.prompt.logprobs if self.prompt is not None else []

    def routed(self, stream: Stream) -> None:
        self.served_by = [stream.prefill.name, stream.decode.name]
        self.stop = stream.stop

    def prompted(self, prompt: PromptOutput) -> None:
        self.prompt = prompt

    def keep_best(self) -> None:
        """Leaves the sequences with the highest mean logprob of their tokens, best first, numbered anew."""
        ranked = sorted(self.sequences, key=lambda sequence: -sequence.mean_logprob)
        self.sequences = ranked[: self.num_choices]


class TextService:
    def __init__(
        self,
        router: Router,
        checkpoint: Checkpoint,
        model: str,
        served_model_names: list[str],
        max_model_len: int,
        seed: int | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        max_num_seqs: int = MAX_SEQUENCES,
        guided_timeout_s: float = 5.0,
        has_priorities: bool = False,
    ) -> None:
        self.router = router
        self.tokenizer = Tokenizer(checkpoint.path)
        self.model = model
        self._seeds = secrets.SystemRandom() if seed is None else random.Random(seed)
        self.served_model_names = served_model_names or [model]
        self._max_model_len = max_model_len
        self._has_priorities = has_priorities
        vocab_size = int(checkpoint.config.get("vocab_size", self.tokenizer.vocab_size))
        self._limits = Limits(vocab_size, checkpoint.eos_token_ids, max_logprobs, max_num_seqs)
        self.guides = GuideCheck(
            checkpoint.path / "tokenizer.json", vocab_size, checkpoint.eos_token_ids, guided_timeout_s
        )
        known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        self._sampling_defaults = {
            k: v for k, v in checkpoint.generation_config.items() if k in known and v is not None
        }

    @property
    def max_model_len(self) -> int:
        """The smallest of this process's limit and those of the workers that answer."""
        infos = [i.info for i in self.router.membership.instances if i.is_ready and i.info is not None]
        return min([self._max_model_len, *(info.max_model_len for info in infos)])

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFound."""
        if name is None or name in (*self.served_model_names, self.model):
            return name or self.served_model_names[0]
        raise ModelNotFound(
            f"the model {reprlib.repr(name)} does not exist here; this server has {', '.join(self.served_model_names)}",
            param="model",
            code="model_not_found",
        )

    async def chat(self, request: ChatCompletionRequest, received_s: float | None = None) -> Generation:
        """`received_s`: since when the request is here, for its timeline."""
        token_ids = await self.chat_token_ids(request, request.truncate_prompt_tokens is not None)
        return await self._generation(request, token_ids, None, "messages", received_s)

    async def chat_token_ids(self, request: ChatFields, may_be_cut: bool = False) -> list[int]:
        """The prompt that the chat template makes. Raises RequestError, also when it cannot fit the context.

        `may_be_cut`: it will be cut down, and so may be longer.
        """
        messages = [message.to_template(at) for at, message in enumerate(request.messages)]
        num_chars = sum(len(message.get("content", "")) for message in messages)
        num_chars += MESSAGE_NUM_CHARS * (len(messages) - 1)
        return await self._tokenize(
            lambda: self.tokenizer.encode_chat(
                messages, request.add_generation_prompt, request.chat_template_kwargs or {}
            ),
            num_chars,
            may_be_cut,
            "messages",
        )

    async def token_ids(self, prompt: str | list[int], special: bool = True, may_be_cut: bool = False) -> list[int]:
        """A prompt's. Raises RequestError."""
        if not isinstance(prompt, str):
            return prompt
        return await self._tokenize(lambda: self.tokenizer.encode(prompt, special), len(prompt), may_be_cut, "prompt")

    async def completion(
        self,
        request: GenerationRequest,
        prompt: str | list[int],
        special: bool = True,
        received_s: float | None = None,
    ) -> Generation:
        token_ids = await self.token_ids(prompt, special, request.truncate_prompt_tokens is not None)
        return await self._generation(request, token_ids, DEFAULT_MAX_TOKENS, "prompt", received_s)

    async def _tokenize(
        self, encode: Callable[[], list[int]], num_chars: int, may_be_cut: bool, param: str
    ) -> list[int]:
        """Raises RequestError, before any work, for a text that cannot fit the context."""
        most = self.max_model_len * self.tokenizer.max_chars_per_token
        if may_be_cut and num_chars > (most := max(most, TRUNCATED_NUM_CHARS)):
            raise RequestError(
                f"{param}: {num_chars} characters are too many to tokenize, even for truncate_prompt_tokens; "
                f"send at most {most}",
                param=param,
            )
        if num_chars > most:
            raise RequestError(
                f"{param}: {num_chars} characters; the model's context is {self.max_model_len} tokens of at most "
                f"{self.tokenizer.max_chars_per_token} characters",
                param=param,
                code="context_length_exceeded",
            )
        return encode() if num_chars <= SHORT_NUM_CHARS else await asyncio.to_thread(encode)

    async def _bad_words(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        words = request.bad_words or []
        if sum(map(len, words)) <= SHORT_NUM_CHARS:
            return self.tokenizer.encode_bad_words(words)
        return await asyncio.to_thread(self.tokenizer.encode_bad_words, words)

    async def _generation(
        self,
        request: GenerationRequest,
        token_ids: list[int],
        default_max_tokens: int | None,
        param: str,
        received_s: float | None,
    ) -> Generation:
        """Checks the limits. Raises RequestError."""
        token_ids = truncated(request, token_ids, self.max_model_len, default_max_tokens or 1)
        wanted = self._max_tokens(request, token_ids, default_max_tokens, param)
        if min(token_ids) < 0 or max(token_ids) >= self._limits.vocab_size:
            raise RequestError(f"{param}: token ids must be in 0 to {self._limits.vocab_size - 1}", param=param)
        sampling = request.sampling(wanted, self._seeds.getrandbits(63), self._sampling_defaults)
        sampling = msgspec.structs.replace(sampling, bad_words=await self._bad_words(request))
        sampling = self._limits.check(request, sampling, len(token_ids))
        if request.priority and not self._has_priorities:
            raise RequestError(
                f"priority: {request.priority}; this server takes requests as they come (--scheduling-policy fcfs)",
                param="priority",
            )
        await self._check_guide(request)
        include = bool(request.include_stop_str_in_output)
        stops = request.stops()
        sequences = [
            Sequence(
                index,
                self.tokenizer.detokenizer(request.skip_special_tokens),
                StopStrings(stops, include),
                sampling.min_tokens,
                shows_stop_token=include or not request.skip_special_tokens,
            )
            for index in range(sampling.n)
        ]
        if wanted == 0:  # the engine gives at least one token, which nobody is shown
            sampling = msgspec.structs.replace(sampling, n=1, max_tokens=1, min_tokens=0, beam_width=0)
        return Generation(
            token_ids,
            sampling,
            sequences,
            request.num_choices,
            every_token=request.return_token_ids,
            is_prompt_only=wanted == 0,
            cache_salt=request.cache_salt or "",
            session=request.prompt_cache_key or "",
            priority=request.priority or 0,
            received_s=received_s,
        )

    async def _check_guide(self, request: GenerationRequest) -> None:
        """Before anybody else sees it. Raises RequestError that names the field, Unavailable."""
        asked = guide_of(request)
        if asked is None:
            return
        try:
            await self.guides.check(asked.guide)
        except GuideError as error:
            raise RequestError(f"{asked.field}: {error}", param=asked.field.partition(".")[0]) from None

    def _max_tokens(
        self, request: GenerationRequest, token_ids: list[int], default_max_tokens: int | None, param: str
    ) -> int:
        """Output tokens that this request may have. Raises RequestError when the context has no room for them."""
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
        return wanted

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """A piece whenever a sequence has text, and one with its finish_reason as its last. Closing it aborts."""
        if generation.is_prompt_only:
            await self._learn_of_prompt(generation)
            for sequence in generation.sequences:
                sequence.finish_reason = "length"
                yield sequence.piece("")
            return
        async with contextlib.aclosing(self._tokens(generation)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                sequence = generation.sequences[token.index]
                text = sequence.add(token)
                if sequence.finish_reason is not None and token.finish_reason is None:
                    generation.stop(sequence.index)
                if text or generation.every_token or sequence.finish_reason is not None:
                    yield sequence.piece(text)

    async def complete(self, generation: Generation) -> list[Piece]:
        """Everything at once: a piece for each choice. Of more sequences than choices, the best."""
        pieces: dict[int, list[Piece]] = {sequence.index: [] for sequence in generation.sequences}
        async with contextlib.aclosing(self.stream(generation)) as stream:  # type: ignore[type-var]
            async for piece in stream:
                pieces[piece.index].append(piece)
        if len(pieces) > generation.num_choices:
            generation.keep_best()
        whole = [joined(pieces[sequence.index]) for sequence in generation.sequences]
        return [msgspec.structs.replace(piece, index=index) for index, piece in enumerate(whole)]

    def _tokens(self, generation: Generation) -> AsyncIterator[TokenOutput]:
        return self.router.serve(
            generation.prompt_token_ids,
            generation.sampling,
            generation.routed,
            generation.prompted,
            generation.cache_salt,
            client_id=generation.client_id,
            received_s=generation.received_s,
            session=generation.session,
            priority=generation.priority,
        )

    async def _learn_of_prompt(self, generation: Generation) -> None:
        """Has the prompt computed when its logprobs are asked for, and nothing after it."""
        if generation.sampling.prompt_logprobs is None:
            return
        async with contextlib.aclosing(self._tokens(generation)) as tokens:  # type: ignore[type-var]
            await anext(tokens)
