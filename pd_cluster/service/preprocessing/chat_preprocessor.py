"""Converts chats to generations: the template's prompt with its images, and the guide and reader of the reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pd_cluster.parsers.parser_plugin import formats_of
from pd_cluster.parsers.reply_format import BUDGET, ReplyFormat, own_tool_parser, resolved_names
from pd_cluster.service.callers.caller import NOBODY, Caller
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.media.media_preparation import MediaPreparation, PromptWithMedia, Source
from pd_cluster.service.preprocessing.request_preprocessor import RequestPreprocessor, SharedFields
from pd_cluster.service.prompts.chat_prompt import ChatPrompts
from pd_cluster.service.prompts.guarded_prompt import ControlTokenGuard
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatFields
from pd_cluster.service.schema.structured_outputs.guide_fields import Asked
from pd_cluster.service.schema.tool_fields import RequestedTools, tools_of
from pd_cluster.settings.process_configs import ApiConfig
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.text.control_tokens import PromptText
from pd_cluster.text.tokenizer import Tokenizer

MESSAGE_NUM_CHARS = 8  # the least that a template adds to each further message
OF_TEXT = ("json_object", "json_schema")  # constrain text only, so clients may combine them with required calls
NUM_END_TOKENS = 256  # this many last tokens of a prompt are decoded, to find out if the answer begins within reasoning


class _Plan(NamedTuple):
    """The parts of a chat's generation. `end`: the end of the prompt, for a reader. `reads`: whether the answer needs a
    reader.
    """

    asked: RequestedTools
    shown: PromptWithMedia
    end: str
    reads: bool
    shared: SharedFields


class ChatPreprocessor:
    """Prepares chats. `guard` keeps control tokens out of chats, unless `allows_control_tokens` or an in-process caller
    permits them.
    """

    def __init__(
        self,
        intake: RequestPreprocessor,
        prompts: ChatPrompts,
        pictures: MediaPreparation,
        form: ReplyFormat,
        guard: ControlTokenGuard,
        allows_control_tokens: bool,
    ) -> None:
        self.intake = intake
        self._prompts = prompts
        self._pictures = pictures
        self._form = form
        self._own_guard = guard
        self.guard = None if allows_control_tokens else guard

    async def close(self) -> None:
        await self._prompts.close()

    async def generation(
        self,
        request: ChatCompletionRequest,
        answer: Asked | None,
        caller: Caller = NOBODY,
        allows_control_tokens: bool | None = None,
        pictures: Sequence[Any] = (),
        variant: str | None = None,
    ) -> Generation:
        """Prepares a chat. `answer`: the guide that the request asks for. Raises RequestError.

        `allows_control_tokens` None: the service's setting. In-process callers pass `pictures` and `variant`.
        """
        asked, may_be_cut = tools_of(request, bool(self._form.tool_parser)), request.truncate_prompt_tokens is not None
        shown = await self.prompt(request, may_be_cut, caller, allows_control_tokens, pictures)
        plan = await self._planned(request, answer, asked, shown, caller, variant)
        generation = await self.intake.generation(request, plan.shown, None, "messages", plan.shared)
        if plan.reads:
            form, (tools, choice, most_calls, _) = self._form, plan.asked
            generation.new_reader = lambda: form.reader(choice, plan.end, most_calls, tools)
            num_earlier = sum(message.num_calls for message in request.messages)
            generation.new_call_id = lambda name, index, **how: form.call_id(name, num_earlier + index, **how)
            generation.hides_reasoning = request.include_reasoning is False and bool(form.reasoning_parser)
            for sequence in generation.sequences:
                sequence.keeps_places = generation.hides_reasoning and generation.every_token
            generation.calls_finish = choice in ("auto", "required")
        return generation

    async def num_tokens(self, request: ChatCompletionRequest, answer: Asked | None, caller: Caller = NOBODY) -> int:
        """Returns the number of tokens of a chat's prompt, which may exceed the context.

        Raises RequestError for everything else that `generation` refuses.
        """
        asked = tools_of(request, bool(self._form.tool_parser))
        plan = await self._planned(request, answer, asked, await self.prompt(request, True, caller), caller)
        number = len(plan.shown.prompt.token_ids)
        self.intake.check(request, number, "messages", plan.shared)
        return number

    async def _planned(
        self,
        request: ChatCompletionRequest,
        answer: Asked | None,
        asked: RequestedTools,
        shown: PromptWithMedia,
        caller: Caller,
        variant: str | None = None,
    ) -> _Plan:
        """Returns the parts of a chat's generation. Raises RequestError."""
        form = self._form
        if asked.choice in ("required", "named") and answer is not None and answer.field == "response_format":
            answer = None if (request.response_format or {}).get("type") in OF_TEXT else answer
        end = await self._end_of(request, shown.prompt.token_ids)
        answered = answer.guide if answer else None
        guide = form.guide(asked.tools, asked.choice, end, asked.most_calls, answered, asked.are_some)
        field = "tools" if asked.tools or answer is None else answer.field
        if request.thinking_token_budget is not None:
            field = BUDGET if guide is None else field
            guide = form.budgeted(guide, request.thinking_token_budget, end)
        reads = asked.choice != "none" or bool(form.reasoning_parser)
        shared = await self.intake.shared(
            request,
            Asked(field, guide) if guide is not None else None,
            form.markers if reads else (),
            caller=caller,
            variant=variant,
        )
        return _Plan(asked, shown, end, reads, shared)

    async def prompt(
        self,
        request: ChatFields,
        may_be_cut: bool,
        caller: Caller,
        allows_control_tokens: bool | None = None,
        pictures: Sequence[Any] = (),
    ) -> PromptWithMedia:
        """Returns the chat template's prompt. Raises RequestError, also when it cannot fit the context.

        `may_be_cut`: the prompt will be truncated, so it may exceed the context.
        """

        def check(num_chars: int) -> None:
            num_chars += MESSAGE_NUM_CHARS * (len(request.messages) - 1)
            self.intake.encoder.check(num_chars, may_be_cut, "messages")

        sources = [Source(*medium) for index, message in enumerate(request.messages) for medium in message.media(index)]
        options = self._pictures.options(request.mm_processor_kwargs or {}, "mm_processor_kwargs")
        sources = [source._replace(options=options) for source in sources]
        self._pictures.check(sources)
        guard = self.guard if allows_control_tokens is None else None if allows_control_tokens else self._own_guard
        prompt = self._pictures.spelled(await self._prompts.render(request, check, guard), sources)
        special = bool(request.add_special_tokens)
        token_ids = await self.intake.encoder.encode_prompt(prompt, special, may_be_cut, "messages", caller)
        salt = caller.own_salt(getattr(request, "cache_salt", None)) if sources else ""
        return await self._pictures.place(token_ids, sources, "messages", pictures, salt)

    async def num_shared(
        self, request: ChatFields, other: ChatFields, generation: Generation, caller: Caller = NOBODY
    ) -> int:
        """Returns how many tokens the prompts of `request` and `other` have in common at their beginning. A token that
        spans the first difference does not count. `generation`: the request's. Raises RequestError.
        """
        prompt, own = await self._spelled(request)
        num_chars = num_same(prompt, (await self._spelled(other)).text)
        places = None if own is None else tuple((a - num_chars, b - num_chars) for a, b in own if a >= num_chars)
        rest = PromptText(prompt[num_chars:], places)
        num_behind = len(await self.intake.encoder.encode_prompt(rest, False, True, "messages", caller))
        end = len(generation.order.prompt_token_ids)
        for span in reversed(generation.order.spans):  # each was one token before it was expanded
            if end - num_behind >= span.stop:
                break
            num_behind -= end - span.stop + 1
            end = span.start
        return max(0, end - num_behind - generation.num_virtual_tokens)

    async def _spelled(self, request: ChatFields) -> PromptText:
        media = [medium for index, message in enumerate(request.messages) for medium in message.media(index)]
        return self._pictures.spelled(await self._prompts.render(request, guard=self.guard), media)

    async def text(self, request: ChatFields) -> str:
        """Returns the text of the chat template's prompt. Raises RequestError."""
        return (await self._prompts.render(request, guard=self.guard)).text

    async def _end_of(self, request: ChatCompletionRequest, token_ids: list[int]) -> str:
        """Returns the last reasoning mark of the generation prompt for a reader; "" if there is none.

        Looks further back for a continued answer, which may have begun its reasoning much earlier.
        """
        form = self._form
        if not form.reasoning_parser:
            return ""
        if request.continue_final_message:
            return form.mark_after(request.messages[-1].text)
        mark, behind = form.last_mark(
            self.intake.tokenizer.decode(token_ids[-NUM_END_TOKENS:], skip_special_tokens=False)
        )
        if not behind.strip():
            return mark
        return await self._generation_mark(request) if request.opens_answer else ""

    async def _generation_mark(self, request: ChatCompletionRequest) -> str:
        """Returns the mark of the generation prompt, by rendering the conversation with and without that prompt."""
        whole, _ = await self._prompts.render(request)
        without, _ = await self._prompts.render(request.model_copy(update={"add_generation_prompt": False}))
        num_shared = min(len(whole), len(without))
        if not whole.startswith(without):
            num_shared = next((at for at in range(num_shared) if whole[at] != without[at]), num_shared)
        return self._form.last_mark(whole, num_shared)[0]


def num_same(one: str, other: str) -> int:
    """Returns the length, in characters, of the texts' common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def reply_format_of(chat: ChatConfig, tokenizer: Tokenizer, model_type: str) -> ReplyFormat:
    """Returns the format by which the model's replies are read. Raises ConfigError."""
    tool_parser = chat.tool_parser or own_tool_parser(tokenizer.config)
    template = tokenizer.template.source if tokenizer.template is not None else ""
    tool_parser, reasoning_parser = resolved_names(tool_parser, chat.reasoning_parser, template, model_type)
    return ReplyFormat(tool_parser, reasoning_parser, formats_of(chat.tool_parser_plugin))


def chats_of(
    intake: RequestPreprocessor, pictures: MediaPreparation, form: ReplyFormat, settings: ApiConfig
) -> ChatPreprocessor:
    """Makes the chat preprocessor of a process."""
    chat, tokenizer = settings.chat, intake.tokenizer
    control = intake.encoder.control
    prompts = ChatPrompts.make(
        tokenizer.template, tokenizer.special_tokens, settings.timeouts.guided_timeout_s, chat, pictures.is_able
    )
    guard = ControlTokenGuard(control, form.history_marks, tokenizer.normalizer(control))
    return ChatPreprocessor(intake, prompts, pictures, form, guard, chat.allows_control_tokens)
