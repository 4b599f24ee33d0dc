"""Text in, text out, over the router: tokenizing, limits, detokenizing, stop strings. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.routing.router import Router
from pd_cluster.parsers.plugin import formats_of
from pd_cluster.parsers.reply import ReplyFormat, own_tool_parser
from pd_cluster.service.answering import Answering
from pd_cluster.service.caller import NOBODY, Caller
from pd_cluster.service.chats import Chats
from pd_cluster.service.embedding import Embedder
from pd_cluster.service.generation import Generation
from pd_cluster.service.intake import Intake
from pd_cluster.service.judging import Judge
from pd_cluster.service.kv_handles import KVHandles
from pd_cluster.service.limits import DEFAULT_MAX_LOGPROBS, Limits
from pd_cluster.service.prompts.chat_prompt import ChatPrompts
from pd_cluster.service.prompts.given_pictures import given_sources
from pd_cluster.service.prompts.guarded_prompt import Guard
from pd_cluster.service.prompts.pictures import PictureIntake, Shown
from pd_cluster.service.request_log import RequestLog
from pd_cluster.service.resumption import Resumption
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatFields
from pd_cluster.service.schema.guide_fields import Asked, compact
from pd_cluster.service.schema.protocol import CompletionRequest, GenerationRequest
from pd_cluster.service.scoring import Scorer
from pd_cluster.service.sequence import Piece
from pd_cluster.service.served_names import ServedNames
from pd_cluster.service.spacing import spaced
from pd_cluster.service.traces import Tracing
from pd_cluster.settings.media import MediaSettings
from pd_cluster.settings.request_log import RequestLogSettings
from pd_cluster.settings.requests import ChatConfig
from pd_cluster.settings.resume import ResumeSettings
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.text.control_tokens import PromptText
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import MAX_SEQUENCES

DEFAULT_MAX_TOKENS = 16  # completions and /generate; chat may fill the context
DEFAULT_GUIDED_TIMEOUT_S = Timeouts().guided_timeout_s
NUM_PROMPTS_A_TURN = 16  # of a long list, between which other tasks have their turn


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The settings of a text service.

    `shows_token_ids`: logprobs name tokens by their ids unless a request chooses. `sampling_defaults`: the result of
    sampling_defaults.py. `requires_model`: a request must name one. `forces_usage`: in all chunks of streams.
    `stream_interval`: tokens of a choice in each piece of a stream. `has_compact_json`: guided JSON has no blanks
    between its parts, unless a request says which. `adapters`: the digest of each, by its name;
    `max_loras` 0: there are none. `shows_load`: to clients that ask how busy the cluster is. `shows_tokenizer`: to
    clients, with its chat template.
    """

    model: str
    served_model_names: list[str]
    max_model_len: int
    seed: int | None = None
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    max_num_seqs: int = MAX_SEQUENCES
    guided_timeout_s: float = DEFAULT_GUIDED_TIMEOUT_S
    has_priorities: bool = False
    chat: ChatConfig = field(default_factory=ChatConfig)
    shows_token_ids: bool = False
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)
    requires_model: bool = False
    forces_usage: bool = False
    stream_interval: int = 1
    has_compact_json: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_loras: int = 0
    media: MediaSettings = field(default_factory=MediaSettings)
    shows_load: bool = False
    shows_tokenizer: bool = False
    handle_secret: bytes = field(default=b"", repr=False)
    log: RequestLogSettings = field(default_factory=RequestLogSettings)
    resume: ResumeSettings = field(default_factory=ResumeSettings)


class TextService:
    def __init__(self, router: Router, checkpoint: Checkpoint, config: ServiceConfig) -> None:
        """Raises ConfigError."""
        self.router = router
        self.tracing: Tracing | None = None  # set by a server that exports traces
        self._config, self._answering = config, Answering(router)
        self.resumption = Resumption(config.resume)
        self._log = RequestLog(config.log) if config.log.has_requests else None
        chat = config.chat
        self.tokenizer = Tokenizer(checkpoint.tokenizer_path, chat.template, checkpoint.path)
        self.response_role = chat.response_role
        self.shows_token_ids = config.shows_token_ids or not self.tokenizer.has_text
        tool_parser = chat.tool_parser or own_tool_parser(self.tokenizer.config)
        form = ReplyFormat(tool_parser, chat.reasoning_parser, formats_of(chat.tool_parser_plugin))
        self.reads_reasoning = bool(form.reasoning_parser)  # a reply's reasoning is told apart from its content
        self.names = ServedNames(config.model, config.served_model_names, config.adapters, config.requires_model)
        self.max_loras = config.max_loras
        self.is_unproven = checkpoint.is_unproven
        vocab_size = int(checkpoint.config.get("vocab_size", self.tokenizer.vocab_size))
        limits = Limits(vocab_size, checkpoint.eos_token_ids, config.max_logprobs, config.max_num_seqs)
        control = self.tokenizer.control_tokens(form.history_marks)
        self.intake = Intake(
            self.tokenizer,
            (checkpoint.tokenizer_path or checkpoint.path) / "tokenizer.json",
            limits,
            lambda: self.max_model_len,
            config.seed,
            config.guided_timeout_s,
            config.has_priorities,
            config.sampling_defaults,
            control,
            self.names.variant_of,
        )
        self.kv_handles = KVHandles(config.handle_secret or secrets.token_bytes(32), config.model)
        encoder, has_priorities = self.intake.encoder, config.has_priorities
        self.embedder = Embedder(
            router, encoder, lambda: self.max_model_len, vocab_size, checkpoint.path, has_priorities, self._log
        )
        prompts = ChatPrompts.make(
            self.tokenizer.template,
            self.tokenizer.special_tokens,
            chat.trusts_request_templates,
            config.guided_timeout_s,
            chat,
            checkpoint.vision is not None,
        )
        self._pictures = PictureIntake(
            checkpoint.vision,
            config.media,
            self._addresses,
            self.router.stats,
            lambda text: self.tokenizer.encode(text, False),
        )
        guard = Guard(control, form.history_marks, self.tokenizer.normalizer(control))
        self._chats = Chats(
            self.tokenizer, self.intake, prompts, self._pictures, form, guard, chat.allows_control_tokens
        )
        judge = Judge(self.tokenizer, encoder, lambda: self.max_model_len, self.guard, has_priorities)
        self.scorer = Scorer(self.embedder, judge, checkpoint.path)

    def _addresses(self) -> set[str]:
        infos = (instance.info for instance in self.router.membership.instances)
        return {info.server_ip for info in infos if info is not None and info.server_ip}

    @property
    def max_model_len(self) -> int:
        """The smallest limit of this process and the ready workers; encoders have none."""
        ready = [i for i in self.router.membership.instances if i.is_ready and i.role != "encode"]
        infos = [i.info for i in ready if i.info is not None]
        return min([self._config.max_model_len, *(info.max_model_len for info in infos)])

    @property
    def vocab_size(self) -> int:
        return self.intake.limits.vocab_size

    @property
    def guard(self) -> Guard | None:
        """Keeps control tokens out of chats; None where chats may have them."""
        return self._chats.guard

    @property
    def takes_images(self) -> bool:
        return self._pictures.is_able

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return "tools" in self.template_variables

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template reads; none without a template."""
        return self.tokenizer.template.variables if self.tokenizer.template is not None else frozenset()

    @property
    def forces_usage(self) -> bool:
        return self._config.forces_usage

    @property
    def shows_load(self) -> bool:
        return self._config.shows_load

    @property
    def shows_tokenizer(self) -> bool:
        return self._config.shows_tokenizer

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

        `allows_control_tokens`: None for the service's own setting. `pictures` and `variant`: those of callers in this
        process.
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

        `may_be_cut`: the prompt will be truncated, and so may be longer. `allows_control_tokens`: None for the
        service's own setting.
        """
        return (await self._chats.prompt(request, may_be_cut, caller, allows_control_tokens)).prompt.token_ids

    async def chat_num_tokens(self, request: ChatCompletionRequest, caller: Caller = NOBODY) -> int:
        """Returns the size of the prompt that `chat` would have computed, even if it exceeds the context.

        Raises RequestError for all else that `chat` refuses.
        """
        return await self._chats.num_tokens(request, self._guide_of(request), caller)

    def _guide_of(self, request: GenerationRequest) -> Asked | None:
        asked = request.asked
        return compact(asked) if asked is not None and self._config.has_compact_json else asked

    async def completions(
        self, request: CompletionRequest, received_s: float | None = None, caller: Caller = NOBODY
    ) -> list[Generation]:
        """Prepares one generation for each prompt. Raises RequestError."""
        prompts, special = request.prompts(), request.add_special_tokens is not False
        shared = await self.intake.shared(request, self._guide_of(request), num_prompts=len(prompts), caller=caller)
        found = []
        for at, token_ids in enumerate(await self.intake.token_ids(request, prompts, special, caller)):
            shown = await self._pictures.place(token_ids, (), "prompt")
            generation = self.intake.generation(request, shown, DEFAULT_MAX_TOKENS, "prompt", shared)
            generation.first_choice = at * generation.num_choices
            generation.received_s = received_s
            found.append(generation)
            if at % NUM_PROMPTS_A_TURN == 0:
                await asyncio.sleep(0)
        return found

    async def completion(
        self,
        request: GenerationRequest,
        prompt: str | list[int] | Shown,
        special: bool = True,
        received_s: float | None = None,
        caller: Caller = NOBODY,
        pictures: Sequence[Any] = (),
        variant: str | None = None,
    ) -> Generation:
        """Prepares a single completion. Raises RequestError.

        `pictures` (see `illustrated`) and `variant`: those of callers in this process.
        """
        shared = await self.intake.shared(request, self._guide_of(request), caller=caller, variant=variant)
        if isinstance(prompt, Shown):
            shown = prompt
        else:
            if isinstance(prompt, str):
                prompt = self.spelled(PromptText(prompt), pictures).text
            (token_ids,) = await self.intake.token_ids(request, [prompt], special, caller)
            shown = await self.illustrated(token_ids, pictures)
        generation = self.intake.generation(request, shown, DEFAULT_MAX_TOKENS, "prompt", shared)
        generation.received_s = received_s
        return generation

    def spelled(self, prompt: PromptText, pictures: Sequence[Any]) -> PromptText:
        """Returns a prompt with pictures as its model's tokenizer expects it."""
        return self._pictures.spelled(prompt, pictures)

    async def illustrated(self, token_ids: list[int], pictures: Sequence[Any]) -> Shown:
        """Returns a prompt with its pictures and videos: objects of a caller in this process, or URLs.

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

    async def text_of(self, token_ids: list[int], caller: Caller = NOBODY) -> str:
        """Returns the text of the ids, special tokens included."""
        return await self.intake.encoder.run(lambda: self.tokenizer.decode(token_ids, False), len(token_ids), caller)

    def pieces(self, generations: list[Generation]) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of all prompts of a request as they come. The first error or closing it ends all."""
        return spaced(self._logged(generations, self._answering.pieces(generations)), self._config.stream_interval)

    def stream(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Yields a piece whenever a sequence has text, and a last one with its finish_reason. Closing it aborts."""
        return self._logged([generation], self._answering.stream(generation))

    async def complete(self, generations: list[Generation]) -> list[Piece]:
        """Returns a piece for each choice. If there are more sequences than choices, the best ones are chosen."""
        if self._log is None:
            return await self._answering.complete(generations)
        self._log.begins(generations)
        pieces = await self._answering.complete(generations)
        self._log.ends(generations, pieces)
        return pieces

    def _logged(
        self, generations: list[Generation], pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        return pieces if self._log is None else self._log.watched(generations, pieces)
