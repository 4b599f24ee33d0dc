"""Offers this project's parsers through the methods that vLLM's tests call, for whole replies and for streams."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import messages
from messages import Text, tools_of

from pd_cluster.parsers.format_table import FORMATS, THINKING
from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning

THINK_SETTINGS = ("enable_thinking", "thinking")
OPENED = (
    "glm45",
    "glm47",
    "kimi_k2",
    "mimo",
    "qwen3",
    "seed_oss",
)  # formats whose tests assume a prompt that ends with an opening mark
END_TOKENS = re.compile(r"(?:<\|plamo:tag\|>|</s>|<｜end▁of▁sentence｜>|<\|im_end\|>)\Z")  # the engine removes them


class ReplyParser:
    """Parses one reply. Subclasses name the formats."""

    calls = thinking = ""
    supports_required_and_named = True

    def __init__(self, tokenizer: Any = None, tools: Any = None, *others: Any, **settings: Any) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools
        self._format = ReplyFormat(self.calls, self.thinking)
        self._settings = settings.get("chat_template_kwargs") or {}
        self._prompt = ""
        self._begins_content = False  # set by vLLM's functions for calls, which receive a reply without its reasoning
        self._stream: Any = None
        self._num_calls = 0

    @property
    def markers(self) -> frozenset[str]:
        return self._format.markers

    @property
    def _parser_engine(self) -> Any:
        """The mark before calls, and its id, with which Mistral's tests replace text."""
        mark = "[TOOL_CALLS]"
        return SimpleNamespace(bot_token=mark, bot_token_id=self.vocab.get(mark))

    @property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()

    def parse(self, model_output: str, request: Any = None, **settings: Any) -> tuple[Any, Any, Any]:
        reader = self._reader(request)
        reasoning, content, calls = self._collected(reader.feed(END_TOKENS.sub("", model_output)) + reader.finish())
        return reasoning, content, calls or None

    def extract_tool_calls(self, model_output: str, request: Any = None) -> messages.ExtractedToolCallInformation:
        self._begins_content = True
        _, content, calls = self.parse(model_output, request)
        return messages.ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls or [], content=content)

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[Any, Any]:
        return self.parse(model_output, request)[:2]

    extract_reasoning_content = extract_reasoning

    def extract_tool_calls_from_content(self, content: str, request: Any) -> messages.ExtractedToolCallInformation:
        return self.extract_tool_calls(content, request)

    def initialize_streaming(self, *others: Any, **more: Any) -> None:
        self._stream = None

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Any, request: Any = None, **more: Any
    ) -> messages.DeltaMessage | None:
        if not previous_text and current_text == delta_text:
            self._stream = None
            self._begins_content = True
        return self._fed(delta_text, request or (ids[3] if len(ids) > 3 else None), False)

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Any, **more: Any
    ) -> messages.DeltaMessage | None:
        if not previous_text and current_text == delta_text:
            self._stream = None
        return self._fed(delta_text, None, False)

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: Sequence[int] = (),
        request: Any = None,
        prompt_token_ids: Sequence[int] | None = None,
        finished: bool = False,
        **more: Any,
    ) -> messages.DeltaMessage | None:
        if prompt_token_ids and self._stream is None:
            self._prompt = self._decoded(prompt_token_ids)
        return self._fed(delta_text, request, finished)

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the output if the parser reads calls or reasoning."""
        reads_calls = bool(self.calls and request.tools and request.tool_choice != "none")
        if self.thinking or reads_calls:
            request.skip_special_tokens = False
        return request

    def finish_streaming(self, *others: Any, **more: Any) -> messages.DeltaMessage | None:
        return self._fed("", None, True)

    def extract_content_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids after the end of the reasoning."""
        ends = (number for number in range(len(ids) + 1) if self.is_reasoning_end(ids[:number]))
        return list(ids[next(ends, len(ids)) :])

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        reader = self._reader(None)
        reader.feed(self._decoded(ids))
        if reader.is_reasoning:
            reader.feed("x")
        return not reader.is_reasoning

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self.is_reasoning_end([*ids])

    def _reader(self, request: Any) -> Any:
        choice = getattr(request, "tool_choice", "auto")
        reads = choice if choice == "required" else "auto"
        if choice == "none" and _tools(request):
            reads = "none"
        return self._format.reader(reads, self._prompt_end(request), None, tools_of(self.tools, _tools(request)))

    def _prompt_end(self, request: Any) -> str:
        """Returns the mark with which the model's template ends such a prompt."""
        given = getattr(request, "chat_template_kwargs", None)
        settings = self._settings | (given if isinstance(given, dict) else {})
        switch = next((settings[name] for name in THINK_SETTINGS if name in settings), None)
        if self._prompt or not self.thinking:
            return self._prompt
        marks = THINKING[self.thinking]
        if self._begins_content:
            return marks.opens[0] + marks.closes[0]
        if switch is None:
            return marks.opens[0] if self.thinking in OPENED else ""
        return marks.opens[0] if switch else marks.opens[0] + marks.closes[0]

    def _decoded(self, ids: Sequence[int]) -> str:
        texts = {number: text for text, number in (self.vocab or {}).items()}
        return "".join(each if isinstance(each, str) else texts.get(each) or chr(each % 0x110000) for each in ids)

    def _fed(self, text: str, request: Any, is_last: bool) -> messages.DeltaMessage | None:
        self._stream = self._stream or self._reader(request)
        parts = self._stream.feed(END_TOKENS.sub("", text))
        if is_last:
            parts = parts + self._stream.finish()
            self._stream = None
        return self._delta(parts)

    def _delta(self, parts: Sequence[Part]) -> messages.DeltaMessage | None:
        if not parts:
            return None
        found: dict[int, messages.DeltaToolCall] = {}
        for part in parts:
            if isinstance(part, (CallBegin, CallArguments)):
                empty = messages.DeltaFunctionCall(arguments="")
                call = found.setdefault(part.index, messages.DeltaToolCall(index=part.index, function=empty))
                if isinstance(part, CallBegin):
                    call.function.name, call.type = part.name, "function"
                    call.id = self._format.call_id(part.name, part.index)
                else:
                    call.function.arguments += part.text
        reasoning, content = _joined(parts, Reasoning), _joined(parts, Content)
        return messages.DeltaMessage(reasoning=reasoning, content=content, tool_calls=list(found.values()))

    def _collected(self, parts: Sequence[Part]) -> tuple[Any, Any, list[messages.ToolCall]]:
        arguments: dict[int, str] = {}
        for part in parts:
            if isinstance(part, CallArguments):
                arguments[part.index] = arguments.get(part.index, "") + part.text
        calls = [
            messages.ToolCall(
                id=self._format.call_id(part.name, part.index),
                function=messages.FunctionCall(name=part.name, arguments=arguments.get(part.index, "")),
            )
            for part in parts
            if isinstance(part, CallBegin)
        ]
        content = _joined(parts, Content)
        if calls and content is not None:
            content = Text(content.strip()) or None
        return _joined(parts, Reasoning), content, calls


def _joined(parts: Sequence[Part], kind: type) -> Text | None:
    text = "".join(part.text for part in parts if isinstance(part, kind))
    return Text(text) if text else None


def _tools(request: Any) -> Any:
    return getattr(request, "tools", None)


_made: dict[tuple[str, str], type[ReplyParser]] = {}


def parser_class(
    calls: str | None = "",
    thinking: str | None = "",
    base: type[ReplyParser] = ReplyParser,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> type[ReplyParser]:
    """Returns the class for these formats, always the same one. Raises KeyError for an unsupported format."""
    names = (calls or "", thinking or "")
    for name, known in zip(names, (FORMATS, THINKING), strict=True):
        if name and name not in known:
            raise KeyError(f"{name}: not a format of this project")
    if names not in _made:
        own = {"calls": names[0], "thinking": names[1], **more}
        _made[names] = type("_".join(["Reply", *filter(None, names)]), (base,), own)
    return _made[names]


def arguments_of(calls: str, before: str, text: str, after: str, tools: Any = None) -> Any:
    """Returns the arguments of a call with this text between its markers."""
    found = parser_class(calls)(None, tools).extract_tool_calls(before + text + after).tool_calls
    return json.loads(found[0].arguments)
