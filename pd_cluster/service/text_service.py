"""Serves requests in text through the router: tokenizes, checks limits, detokenizes, finds stop strings. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.routing.router import Router
from pd_cluster.service.callers.caller import NOBODY, Caller
from pd_cluster.service.callers.served_names import ServedNames
from pd_cluster.service.generation.generation_watch import request_log
from pd_cluster.service.generation.kv_handles import KVHandles
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_generator import TextGenerator
from pd_cluster.service.media.given_media import given_sources
from pd_cluster.service.media.media_preparation import MediaPreparation, PromptWithMedia
from pd_cluster.service.pooling.poolers import poolers_of
from pd_cluster.service.preprocessing.chat_preprocessor import chats_of, reply_format_of
from pd_cluster.service.preprocessing.request_preprocessor import preprocessor_of
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.service.prompts.token_offsets import offsets_of
from pd_cluster.service.request_traces import Tracing
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatFields
from pd_cluster.service.schema.completion_protocol import CompletionRequest, GenerationRequest
from pd_cluster.service.schema.structured_outputs.guide_fields import Asked, compact
from pd_cluster.service.service_config import ServiceConfig, ServingInstances
from pd_cluster.text.control_tokens import PromptText
from pd_cluster.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # the default of completions and /generate; a chat may fill the context
NUM_PROMPTS_A_TURN = 16  # prompts to prepare before other tasks get a turn


class TextService:
    """`tracing`: the exporter of traces, if enabled."""

    def __init__(
        self, router: Router, checkpoint: Checkpoint, config: ServiceConfig, tracing: Tracing | None = None
    ) -> None:
        """Raises ConfigError."""
        self.router, self.tracing = router, tracing
        self.settings = settings = config.settings
        log = request_log(settings.http.log)
        answering = TextGenerator(router, log, settings.stream_interval)
        self.pieces, self.stream, self.complete = answering.pieces, answering.stream, answering.complete
        self._instances = ServingInstances(router, config.max_model_len)
        self.tokenizer = tokenizer = Tokenizer(checkpoint.tokenizer_path, settings.chat.template, checkpoint.path)
        self.shows_token_ids = settings.returns_tokens_as_token_ids or not tokenizer.has_text
        form = reply_format_of(settings.chat, tokenizer, str(checkpoint.config.get("model_type", "")))
        self.reads_reasoning = bool(form.reasoning_parser)  # a reply's reasoning is separated from its content
        self.names = ServedNames(
            settings.engine.model, settings.served_model_names, config.adapters, settings.requires_model
        )
        self.max_loras = settings.engine.adapters.max_loras if settings.engine.adapters.are_wanted else 0
        self.response_role, self.forces_usage = settings.chat.response_role, settings.forces_usage
        self.is_unproven = checkpoint.is_unproven
        control = tokenizer.control_tokens(form.history_marks)
        encoder = PromptEncoder(tokenizer, self._instances.max_model_len, control)
        self.intake = preprocessor_of(checkpoint, encoder, self.names, config)
        self.kv_handles = KVHandles(config.handle_secret, settings.engine.model)
        self._pictures = MediaPreparation(
            checkpoint.vision,
            settings.media,
            self._instances.addresses,
            router.stats,
            partial(tokenizer.encode, add_special_tokens=False),
        )
        self._chats = chats_of(self.intake, self._pictures, form, settings)
        self.guard = self._chats.guard  # keeps control tokens out of chats; None if chats may contain them
        poolers = poolers_of(router, self.intake, self.guard, checkpoint.path, log, settings.pooler)
        self.scorer, self.embedder, self.classifier, self.label_scorer = poolers

    @property
    def max_model_len(self) -> int:
        return self._instances.max_model_len()

    @property
    def vocab_size(self) -> int:
        return self.intake.limits.vocab_size

    @property
    def takes_images(self) -> bool:
        return self._pictures.is_able

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template uses tools."""
        return "tools" in self.template_variables

    @property
    def template_variables(self) -> frozenset[str]:
        """The names of variables that the chat template reads; empty without a template."""
        return self.tokenizer.template.variables if self.tokenizer.template is not None else frozenset()

    async def close(self) -> None:
        await self.intake.close()
        await self._chats.close()
        await self._pictures.close()
        if self.tracing is not None:
            await self.tracing.close()

    async def chat(
        self,
        request: ChatCompletionRequest,
        received_s: float | None = None,
        caller: Caller = NOBODY,
        allows_control_tokens: bool | None = None,
        pictures: Sequence[Any] = (),
        variant: str | None = None,
    ) -> Generation:
        """Prepares a chat. `received_s`: the arrival time, for its timeline. Raises RequestError.

        `allows_control_tokens` None: the service's setting. In-process callers pass `pictures` and `variant`.
        """
        answer = self._guide_of(request)
        generation = await self._chats.generation(request, answer, caller, allows_control_tokens, pictures, variant)
        generation.received_s = received_s
        return generation

    async def chat_token_ids(
        self,
        request: ChatFields,
        may_be_cut: bool = False,
        caller: Caller = NOBODY,
        allows_control_tokens: bool | None = None,
    ) -> list[int]:
        """Returns the chat template's prompt. Raises RequestError, also when it cannot fit the context.

        `may_be_cut`: the prompt will be truncated, so it may exceed the context. `allows_control_tokens` None: the
        service's setting.
        """
        return (await self._chats.prompt(request, may_be_cut, caller, allows_control_tokens)).prompt.token_ids

    async def chat_num_tokens(self, request: ChatCompletionRequest, caller: Caller = NOBODY) -> int:
        """Returns the number of tokens of the prompt that `chat` would compute, even if it exceeds the context.

        Raises RequestError for everything else that `chat` refuses.
        """
        return await self._chats.num_tokens(request, self._guide_of(request), caller)

    async def chat_num_shared(
        self, request: ChatFields, other: ChatFields, generation: Generation, caller: Caller = NOBODY
    ) -> int:
        """Returns how many tokens the prompts of two chats have in common at their beginning. Raises RequestError."""
        return await self._chats.num_shared(request, other, generation, caller)

    def _guide_of(self, request: GenerationRequest) -> Asked | None:
        asked, is_compact = request.asked, self.settings.structured_outputs.disable_any_whitespace
        return compact(asked) if asked is not None and is_compact else asked

    async def completions(
        self, request: CompletionRequest, received_s: float | None = None, caller: Caller = NOBODY
    ) -> list[Generation]:
        """Prepares one generation for each prompt. Raises RequestError."""
        prompts, special = request.prompts(), request.add_special_tokens is not False
        shared = await self.intake.shared(request, self._guide_of(request), num_prompts=len(prompts), caller=caller)
        found = []
        for at, token_ids in enumerate(await self.intake.token_ids(request, prompts, special, caller)):
            shown = await self._pictures.place(token_ids, (), "prompt")
            generation = await self.intake.generation(request, shown, DEFAULT_MAX_TOKENS, "prompt", shared)
            generation.first_choice = at * generation.num_choices
            generation.received_s = received_s
            found.append(generation)
            if at % NUM_PROMPTS_A_TURN == 0:
                await asyncio.sleep(0)
        return found

    async def completion(
        self,
        request: GenerationRequest,
        prompt: str | list[int] | PromptWithMedia,
        received_s: float | None = None,
        caller: Caller = NOBODY,
        pictures: Sequence[Any] = (),
        variant: str | None = None,
    ) -> Generation:
        """Prepares a single completion. Raises RequestError.

        In-process callers pass `pictures` (see `illustrated`) and `variant`.
        """
        shared = await self.intake.shared(request, self._guide_of(request), caller=caller, variant=variant)
        if isinstance(prompt, PromptWithMedia):
            shown = prompt
        else:
            if isinstance(prompt, str):
                prompt = self.spelled(PromptText(prompt), pictures).text
            (token_ids,) = await self.intake.token_ids(request, [prompt], True, caller)
            shown = await self.illustrated(token_ids, pictures)
        generation = await self.intake.generation(request, shown, DEFAULT_MAX_TOKENS, "prompt", shared)
        generation.received_s = received_s
        return generation

    def spelled(self, prompt: PromptText, pictures: Sequence[Any]) -> PromptText:
        """Returns a prompt with its images' placeholders in the form that the model's tokenizer expects."""
        return self._pictures.spelled(prompt, pictures)

    async def illustrated(self, token_ids: list[int], pictures: Sequence[Any]) -> PromptWithMedia:
        """Returns a prompt with its images and videos: an in-process caller's objects, or URLs.

        Raises RequestError.
        """
        sources, given = given_sources(pictures, self._pictures.options)
        self._pictures.check(sources)
        return await self._pictures.place(token_ids, sources, "prompt", given)

    async def token_ids(
        self, prompt: str, special: bool = True, may_be_cut: bool = False, caller: Caller = NOBODY
    ) -> list[int]:
        """Returns a prompt's token ids. Raises RequestError."""
        (found,) = await self.intake.encoder.encode([prompt], special, may_be_cut, "prompt", caller)
        return found

    async def chat_text(self, request: ChatFields) -> str:
        """Returns the text of the chat template's prompt. Raises RequestError."""
        return await self._chats.text(request)

    async def offsets(
        self, text: str, special: bool, token_ids: list[int], caller: Caller = NOBODY
    ) -> list[list[int]] | None:
        """Returns the positions of a prompt's tokens in its text; see token_offsets.py."""
        encoder, tokenizer = self.intake.encoder, self.tokenizer
        return await encoder.run(lambda: offsets_of(tokenizer, text, special, token_ids), len(text), caller)

    async def text_of(self, token_ids: list[int], caller: Caller = NOBODY) -> str:
        """Returns the text of the ids, special tokens included."""
        return await self.intake.encoder.run(lambda: self.tokenizer.decode(token_ids, False), len(token_ids), caller)
