"""Text in, text out, over the router: tokenizing, limits, detokenizing, stop strings. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

import msgspec

from pd_cluster.api.caller import NOBODY, Caller
from pd_cluster.api.chat_prompt import ChatPrompts
from pd_cluster.api.chat_protocol import ChatCompletionRequest, ChatFields
from pd_cluster.api.generation import Generation
from pd_cluster.api.guarded_prompt import Guard
from pd_cluster.api.guide_fields import Asked, guide_of
from pd_cluster.api.intake import Intake
from pd_cluster.api.limits import DEFAULT_MAX_LOGPROBS, Limits
from pd_cluster.api.merge import merged, together
from pd_cluster.api.protocol import MAX_SEQUENCES, CompletionRequest, GenerationRequest
from pd_cluster.api.sequence import Piece, joined
from pd_cluster.api.tool_fields import tools_of
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.router import Router
from pd_cluster.config import ChatConfig
from pd_cluster.errors import GenerationError, ModelNotFound, RequestError
from pd_cluster.parsers.reply import ReplyFormat
from pd_cluster.text import Tokenizer
from pd_cluster.types import TokenOutput

DEFAULT_MAX_TOKENS = 16  # completions and /generate; chat may fill the context
MESSAGE_NUM_CHARS = 8  # what a template adds to each further message, at the least
PLAIN_CHATS = ChatConfig()
NUM_PROMPTS_A_TURN = 16  # of a long list, between which others have their turn
MOST_TOKENS_OF_PIECE = 64  # of an answer that is read whole
NUM_END_TOKENS = 16  # of a prompt, that tell whether an answer begins with reasoning


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
        guided_timeout_s: float = 4.0,
        has_priorities: bool = False,
        chat: ChatConfig = PLAIN_CHATS,
        shows_token_ids: bool = False,
        sampling_defaults: Mapping[str, int | float] | None = None,
        requires_model: bool = False,
    ) -> None:
        """`shows_token_ids`: logprobs name tokens by their ids where a request does not say.

        `sampling_defaults`: as sampling_defaults.py finds them. Raises ConfigError.
        """
        self.router = router
        self.tokenizer = Tokenizer(checkpoint.tokenizer_path, chat.template, checkpoint.path)
        self.response_role = chat.response_role
        self.shows_token_ids = shows_token_ids or not self.tokenizer.has_text
        self._reply_format = ReplyFormat(chat.tool_parser, chat.reasoning_parser)
        self.model = model
        self.is_unproven = checkpoint.is_unproven
        self.served_model_names = served_model_names or [model]
        self._max_model_len = max_model_len
        vocab_size = int(checkpoint.config.get("vocab_size", self.tokenizer.vocab_size))
        limits = Limits(vocab_size, checkpoint.eos_token_ids, max_logprobs, max_num_seqs)
        self._requires_model = requires_model
        control = self.tokenizer.control_tokens(self._reply_format.history_marks)
        self._guard = Guard(control, self._reply_format.history_marks, self.tokenizer.normalizer(control))
        self._allows_control_tokens = chat.allows_control_tokens
        self._intake = Intake(
            self.tokenizer,
            (checkpoint.tokenizer_path or checkpoint.path) / "tokenizer.json",
            limits,
            lambda: self.max_model_len,
            seed,
            guided_timeout_s,
            has_priorities,
            sampling_defaults or {},
            control,
        )
        self._chats = ChatPrompts.make(
            self.tokenizer.template, self.tokenizer.special_tokens, chat.trusts_request_templates, guided_timeout_s
        )

    @property
    def max_model_len(self) -> int:
        """The smallest of this process's limit and those of the workers that answer."""
        infos = [i.info for i in self.router.membership.instances if i.is_ready and i.info is not None]
        return min([self._max_model_len, *(info.max_model_len for info in infos)])

    @property
    def vocab_size(self) -> int:
        return self._intake.limits.vocab_size

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFound, and RequestError for none where one is required."""
        if name is None and self._requires_model:
            raise RequestError(
                f"model: missing; this server requires it (--require-model): {', '.join(self.served_model_names)}",
                param="model",
            )
        if name is None or name in (*self.served_model_names, self.model):
            return name or self.served_model_names[0]
        raise ModelNotFound(
            f"the model {reprlib.repr(name)} does not exist here; this server has {', '.join(self.served_model_names)}",
            param="model",
            code="model_not_found",
        )

    @property
    def guard(self) -> Guard | None:
        """What keeps control tokens out of chats; None where these may have them."""
        return None if self._allows_control_tokens else self._guard

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for them."""
        return self.tokenizer.template is not None and "tools" in self.tokenizer.template.variables

    async def close(self) -> None:
        await self._intake.close()
        await self._chats.close()

    async def chat(
        self,
        request: ChatCompletionRequest,
        received_s: float | None = None,
        caller: Caller = NOBODY,
        allows_control_tokens: bool | None = None,
    ) -> Generation:
        """`received_s`: since when the request is here, for its timeline. Raises RequestError.

        `allows_control_tokens`: None for what the service was made with.
        """
        form = self._reply_format
        asked, answer = tools_of(request, bool(form.tool_parser)), guide_of(request)
        token_ids = await self.chat_token_ids(
            request, request.truncate_prompt_tokens is not None, bool(asked.tools), caller, allows_control_tokens
        )
        end = self._end_of(request, token_ids)
        guide = form.guide(asked.tools, asked.choice, end, asked.most_calls, answer.guide if answer else None)
        field = "tools" if asked.tools or answer is None else answer.field
        reads = asked.choice != "none" or bool(form.reasoning_parser)
        shared = await self._intake.shared(
            request,
            Asked(field, guide) if guide is not None else None,
            form.markers if reads else (),
            caller=caller,
        )
        generation = self._intake.generation(request, token_ids, None, "messages", shared)
        if reads:
            generation.new_reader = lambda: form.reader(asked.choice, end, asked.most_calls)
            generation.new_call_id = form.call_id
            generation.calls_finish = asked.choice in ("auto", "required")
        generation.received_s = received_s
        return generation

    async def chat_token_ids(
        self,
        request: ChatFields,
        may_be_cut: bool = False,
        shows_tools: bool = True,
        caller: Caller = NOBODY,
        allows_control_tokens: bool | None = None,
    ) -> list[int]:
        """The prompt that the chat template makes. Raises RequestError, also when it cannot fit the context.

        `may_be_cut`: it will be cut down, and so may be longer.
        """

        def check(num_chars: int) -> None:
            num_chars += MESSAGE_NUM_CHARS * (len(request.messages) - 1)
            self._intake.encoder.check(num_chars, may_be_cut, "messages")

        guard = self.guard if allows_control_tokens is None else None if allows_control_tokens else self._guard
        prompt = await self._chats.render(request, shows_tools, check, guard)
        special = bool(request.add_special_tokens)
        return await self._intake.encoder.encode_prompt(prompt, special, may_be_cut, "messages", caller)

    def _end_of(self, request: ChatCompletionRequest, token_ids: list[int]) -> str:
        """The prompt's end as a reader wants it; an answer that goes on may have begun its reasoning long before."""
        text = self.tokenizer.decode(token_ids[-NUM_END_TOKENS:], skip_special_tokens=False)
        if not request.continue_final_message:
            return text
        content = request.messages[-1].text
        return "<think>" if content.rfind("<think>") > content.rfind("</think>") else "</think>"

    async def completions(
        self, request: CompletionRequest, received_s: float | None = None, caller: Caller = NOBODY
    ) -> list[Generation]:
        """One for each prompt. Raises RequestError."""
        prompts, special = request.prompts(), request.add_special_tokens is not False
        shared = await self._intake.shared(request, guide_of(request), num_prompts=len(prompts), caller=caller)
        found = []
        for at, token_ids in enumerate(await self._intake.token_ids(request, prompts, special, caller)):
            generation = self._intake.generation(request, token_ids, DEFAULT_MAX_TOKENS, "prompt", shared)
            generation.first_choice = at * generation.num_choices
            generation.received_s = received_s
            found.append(generation)
            if at % NUM_PROMPTS_A_TURN == 0:
                await asyncio.sleep(0)
        return found

    async def completion(
        self,
        request: GenerationRequest,
        prompt: str | list[int],
        special: bool = True,
        received_s: float | None = None,
        caller: Caller = NOBODY,
    ) -> Generation:
        """Raises RequestError."""
        shared = await self._intake.shared(request, guide_of(request), caller=caller)
        (token_ids,) = await self._intake.token_ids(request, [prompt], special, caller)
        generation = self._intake.generation(request, token_ids, DEFAULT_MAX_TOKENS, "prompt", shared)
        generation.received_s = received_s
        return generation

    async def token_ids(
        self, prompt: str, special: bool = True, may_be_cut: bool = False, caller: Caller = NOBODY
    ) -> list[int]:
        """A prompt's. Raises RequestError."""
        (found,) = await self._intake.encoder.encode([prompt], special, may_be_cut, "prompt", caller)
        return found

    async def text_of(self, token_ids: list[int], caller: Caller = NOBODY) -> str:
        """What the ids stand for, special tokens included."""
        return await self._intake.encoder.run(lambda: self.tokenizer.decode(token_ids, False), len(token_ids), caller)

    def pieces(self, generations: list[Generation]) -> AsyncGenerator[Piece, None]:
        """Of all prompts of a request, as they come. The first error ends all, and so does closing it."""
        return merged([self.stream(generation) for generation in generations], lambda error: _fail(generations, error))

    async def stream(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """A piece whenever a sequence has text, and one with its finish_reason as its last. Closing it aborts."""
        if generation.is_prompt_only:
            await self._learn_of_prompt(generation)
            for sequence in generation.sequences:
                sequence.finish_reason = "length"
                yield generation.piece_of(sequence, "")
            return
        if generation.batch and not generation.has_stops:
            async with contextlib.aclosing(self._whole(generation)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        async with contextlib.aclosing(self._tokens(generation)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                sequence = generation.sequences[token.index]
                text = sequence.add(token)
                if sequence.finish_reason is not None and token.finish_reason is None:
                    generation.stop(sequence.index)
                if text or generation.every_token or sequence.finish_reason is not None:
                    yield generation.piece_of(sequence, text)

    async def complete(self, generations: list[Generation]) -> list[Piece]:
        """Everything at once: a piece for each choice. Of more sequences than choices, the best."""
        works = [self._complete(generation) for generation in generations]
        whole = await together(works, lambda error: _fail(generations, error))
        return [piece for pieces in whole for piece in pieces]

    async def _complete(self, generation: Generation) -> list[Piece]:
        first = generation.first_choice
        found: dict[int, list[Piece]] = {sequence.index: [] for sequence in generation.sequences}
        by_token = generation.is_prompt_only or generation.has_stops
        pieces = self.stream(generation) if by_token else self._whole(generation)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                found[piece.index - first].append(piece)
        if len(found) > generation.num_choices:
            generation.keep_best()
        whole = [joined(found[sequence.index]) for sequence in generation.sequences]
        return [msgspec.structs.replace(piece, index=first + at) for at, piece in enumerate(whole)]

    async def _whole(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """As `stream`, for who reads it to its end, where only the engine ends an answer: few and large pieces."""
        arrived: dict[int, list[TokenOutput]] = {sequence.index: [] for sequence in generation.sequences}
        async with contextlib.aclosing(self._tokens(generation, gathers=True)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                own = arrived[token.index]
                own.append(token)
                if token.finish_reason is not None or token.earlier or len(own) == MOST_TOKENS_OF_PIECE:
                    sequence, arrived[token.index] = generation.sequences[token.index], []
                    yield generation.piece_of(sequence, sequence.add_all(own))

    def _tokens(self, generation: Generation, gathers: bool = False) -> AsyncIterator[TokenOutput]:
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
            gathers=gathers,
            batch=generation.batch,
        )

    async def _learn_of_prompt(self, generation: Generation) -> None:
        """Has the prompt computed when its logprobs are asked for, and nothing after it."""
        if generation.sampling.prompt_logprobs is None:
            return
        async with contextlib.aclosing(self._tokens(generation)) as tokens:  # type: ignore[type-var]
            await anext(tokens)


def _fail(generations: list[Generation], error: BaseException) -> None:
    """What one prompt of a request failed of ends the others: it is not the client who left them."""
    for generation in generations:
        generation.fail(GenerationError(f"another prompt of the request failed: {error}"))
