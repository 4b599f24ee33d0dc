"""Formats of calls in JSON, Python or Gemma's braces, by vLLM's names, with their models' reasoning."""

from __future__ import annotations

from pd_cluster.parsers.brace_markup import BraceCalls
from pd_cluster.parsers.call_format import Format
from pd_cluster.parsers.irregular_formats import DotsCalls
from pd_cluster.parsers.json_markup import JsonCalls, NamedCalls
from pd_cluster.parsers.pythonic_sections import PythonicSections
from pd_cluster.parsers.reasoning import Thinking
from pd_cluster.parsers.xlam_markup import XlamCalls

ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
COHERE = JsonCalls(ACTION, ACTION_END, is_array=True, key="parameters", name="tool_name", call_id="tool_call_id")
PLAMO_PIECES = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")
JSON_FORMATS: dict[str, Format] = {
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "dots": DotsCalls(
        begin="<dots_function_call>",
        end="</dots_function_call>",
        name=('<invoke name="', '">'),
        close="</invoke>",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        is_section=True,
    ),
    "functiongemma": BraceCalls("<start_function_call>", "<end_function_call>", "<escape>", quotes_all=True),
    "gemma4": BraceCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite-20b-fc": JsonCalls("<function_call>"),
    "lfm2": PythonicSections("<|tool_call_start|>", "<|tool_call_end|>"),
    "longcat": JsonCalls("<longcat_tool_call>", "</longcat_tool_call>"),
    "olmo3": PythonicSections("<function_calls>", "</function_calls>", lines=True),
    "plamo3": NamedCalls(
        begin="<|plamo:begin_tool_request:plamo|>",
        head=(["marker", "<|plamo:begin_tool_name:plamo|>"],),
        tail=(
            ["marker", "<|plamo:end_tool_name:plamo|>"],
            ["exact", "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>"],
            ["text", "json"],
        ),
        separator="<|plamo:msg|>",
        fence="<|plamo:end_tool_arguments:plamo|>",
        end="<|plamo:end_tool_request:plamo|>",
        opening="<|plamo:begin_tool_requests:plamo|>",
        closing="<|plamo:end_tool_requests:plamo|>",
        around=(
            r"^\s*<\|plamo:begin_tool_name:plamo\|>|<\|plamo:end_tool_name:plamo\|>\s*"
            r"<\|plamo:begin_tool_arguments:plamo\|>\s*(?:<\|plamo:constrain\|>\s*json\s*)?$"
        ),
        pieces=PLAMO_PIECES,
    ),
    "xlam": XlamCalls(),
}
COHERE_THINKING = Thinking(
    "perhaps",
    opens=("<|START_THINKING|>",),
    closes=("<|END_THINKING|>",),
    wraps=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    also_wraps=("<|START_TEXT|>", "<|END_TEXT|>"),
    cites=True,
)
JSON_THINKING: dict[str, Thinking] = {
    "cohere_command3": COHERE_THINKING,
    "cohere_command4": COHERE_THINKING,
    "gemma4": Thinking(
        "perhaps",
        opens=("<|channel>thought", "<|channel>"),
        closes=("<channel|>",),
        ends=("<|tool_call>",),
        bare="thought\n",
    ),
    "granite_thinking_parser": Thinking("reasoning"),
    "holo2": Thinking("reasoning"),
    "minicpmv": Thinking("reasoning"),
    "nemotron_v3": Thinking("reasoning"),
    "plamo3": Thinking(
        "reasoning",
        opens=("<|plamo:begin_think:plamo|>",),
        closes=("<|plamo:end_think:plamo|>",),
        ends=("<|plamo:begin_tool_requests:plamo|>",),
        pieces=PLAMO_PIECES,
    ),
}
