"""Writers of calls and reasoning for the formats with JSON, Python or Gemma's braces, used with the twenty replies.

Each follows its model's chat template. Does not know the expected parts.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.format_replies import Call, Writer, between_tags, each_begun, named_json, section

PLAMO_BEGIN, PLAMO_END = "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def braces(begin: str, end: str, quote: str) -> Writer:
    def value(given: Any) -> str:
        match given:
            case str():
                return f"{quote}{given}{quote}"
            case dict():
                return f"{{{members(given)}}}"
            case list():
                return f"[{','.join(map(value, given))}]"
        return as_json(given)

    def members(given: dict[str, Any]) -> str:
        return ",".join(f"{key}:{value(each)}" for key, each in given.items())

    calls = section("", "", lambda call: f"{begin}call:{call.name}{{{members(call.arguments)}}}{end}")
    return Writer(calls, "gemma4", ("<|channel>thought\n", "<channel|>"))


def python(call: Call) -> str:
    """Writes strings in double quotes and other values as Python literals."""
    arguments = (f"{key}={as_json(v) if isinstance(v, str) else repr(v)}" for key, v in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def plamo(call: Call) -> str:
    return (
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{call.name}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{as_json(call.arguments)}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    )


def cohere(call: Call) -> str:
    return as_json({"tool_call_id": "0", "tool_name": call.name, "parameters": call.arguments})


DOTS = between_tags('<invoke name="NAME">PARAMETERS</invoke>', '<parameter name="KEY">VALUE</parameter>')
COHERE_CALLS = section("<|START_ACTION|>\n[\n    ", "\n]\n<|END_ACTION|>", cohere, ",\n    ")
COHERE_THOUGHT = ("<|START_THINKING|>", "<|END_THINKING|>")
JSON_WRITERS = {
    "cohere_command3": Writer(COHERE_CALLS, "cohere_command3", COHERE_THOUGHT),
    "cohere_command4": Writer(COHERE_CALLS, "cohere_command4", COHERE_THOUGHT),
    "dots": Writer(section("<dots_function_call>", "</dots_function_call>", DOTS), "qwen3"),
    "ernie45": Writer(
        section("", "", lambda call: f"<tool_call>\n{named_json(call)}\n</tool_call>", "\n"),
        "ernie45",
        prompt_end="<think>",
    ),
    "functiongemma": braces("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": braces("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite-20b-fc": Writer(each_begun("<function_call> "), "qwen3"),
    "jamba": Writer(section("<tool_calls>[\n    ", "\n]</tool_calls>", named_json, ",\n    "), "qwen3"),
    "lfm2": Writer(section("<|tool_call_start|>[", "]<|tool_call_end|>", python, ", "), "qwen3"),
    "llama4_json": Writer(section("<|python_tag|>", "", named_json, "; "), "qwen3"),
    "longcat": Writer(
        section("", "", lambda call: f"<longcat_tool_call>{named_json(call)}</longcat_tool_call>", "\n"), "qwen3"
    ),
    "olmo3": Writer(section("<function_calls>", "</function_calls>", python, "\n"), "olmo3", prompt_end="<think>"),
    "phi4_mini_json": Writer(section("functools[", "]", named_json, ", "), "qwen3"),
    "plamo3": Writer(
        section(PLAMO_BEGIN, PLAMO_END, plamo), "plamo3", ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")
    ),
    "qwen3_json": Writer(section("", "", lambda call: f"<tool_call>{named_json(call)}</tool_call>", "\n"), "qwen3"),
    "xlam": Writer(section("```json\n[", "]\n```", named_json, ", "), "qwen3"),
}
