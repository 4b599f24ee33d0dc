"""Twenty replies that any format can express, the parts that a parser must find, and a writer for each format.

A format's writer follows its model's chat template. The expected parts are written by hand and equal for all formats.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pd_cluster.parsers.reply_format import Tool

Arguments = dict[str, Any]
NESTED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "inner": {"type": "object", "properties": {"open": {"type": "boolean"}, "note": {"type": "string"}}},
    },
}
BOOK = Tool(
    "book",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "flag": {"type": "boolean"},
            "back": {"type": ["string", "null"]},
            "place": NESTED,
            "tags": {"type": "array", "items": {"type": "string"}},
            "stops": {"type": "array", "items": NESTED},
        },
    },
)
TOOLS = (BOOK, Tool("now", {"type": "object", "properties": {"zone": {"type": "string"}}}))


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Arguments


@dataclass(frozen=True)
class Reply:
    """`parts`: texts and calls in order. `thought`: reasoning before them. If `cut` is set, the reply ends after this
    text, and `torn` is the received part of the last call's arguments.
    """

    parts: tuple[str | Call, ...]
    thought: str = ""
    cut: str = ""
    torn: str = ""


STRAY = 'He said "hi" \\ {a: [1]} </x> <y z="1"> & &amp; ]]'
CODE = "\n    def f():\n        return 1 < 2\n\n"
UNICODE = "杭州 🙂 é\u2028"
SHAPE = {"city": "Köln", "days": 2, "inner": {"open": True, "note": "a, b: {c}"}}
REPLIES = (
    Reply(('Hello {world}, <b>"x"</b> [1, 2].',)),
    Reply((Call("now", {}),)),
    Reply((Call("book", {"city": "Bonn", "days": 3}),)),
    Reply((Call("book", {"city": "Bonn"}), Call("now", {"zone": "CET"}))),
    Reply((Call("now", {"zone": UNICODE}), Call("now", {"zone": "UTC"}), Call("now", {}))),
    Reply(("Let me look.\n", Call("now", {"zone": "CET"}))),
    Reply((Call("now", {"zone": "CET"}), "Done {so}.")),
    Reply(("First ", Call("now", {}), "and then", Call("book", {"days": 1}))),
    Reply((Call("book", {"place": SHAPE}),)),
    Reply((Call("book", {"stops": [SHAPE, {"city": "Bern"}], "tags": ["a b", "c"]}), Call("now", {}))),
    Reply((Call("book", {"city": STRAY, "days": -7}),)),
    Reply((Call("book", {"city": CODE, "flag": False}),)),
    Reply((Call("book", {"share": -0.5, "days": 12345678901234567890}), Call("book", {"share": 1.5e-07}))),
    Reply((Call("book", {"flag": True, "back": None}),)),
    Reply((Call("book", {"city": "", "tags": [], "place": {}}),)),
    Reply((Call("now", {"zone": "42"}), Call("now", {"zone": "null"}), Call("now", {"zone": " [1] "}))),
    Reply((Call("book", {"days": 3, "city": "Bonn am Rhein"}),), cut="Bonn am", torn='{"days": 3, "city": "Bonn am'),
    Reply((Call("now", {}), Call("book", {"days": 123})), cut="12", torn='{"days": 12'),
    Reply(("I look: ", Call("book", {"city": "Bonn"})), thought="The user wants\n\na room <now>."),
    Reply(("It is {noon}.",), thought="No call is needed."),
)


def plain(value: Any) -> str:
    """Writes a value as templates do between tags: strings unquoted, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def between_tags(
    call: str, parameter: str, between: str = "", value: Callable[[Any], str] = plain
) -> Callable[[Call], str]:
    """Returns a writer for one call. `call` has the placeholders NAME and PARAMETERS, `parameter` KEY and VALUE."""

    def write(given: Call) -> str:
        written = [parameter.replace("KEY", key).replace("VALUE", value(each)) for key, each in given.arguments.items()]
        return call.replace("NAME", given.name).replace("PARAMETERS", between.join(["", *written, ""]))

    return write


def section(before: str, after: str, one: Callable[[Call], str], between: str = "") -> Callable[[list[Call]], str]:
    """Returns a writer for successive calls."""
    return lambda calls: f"{before}{between.join(map(one, calls))}{after}"


def kind_of(value: Any) -> str:
    """Returns the name of a value's type in Kimi K3's tags."""
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    return "null" if value is None else kinds[type(value)]


def dsml(name: str, gap: str = "") -> Callable[[list[Call]], str]:
    mark = f"｜DSML｜{gap}"

    def parameter(key: str, value: Any) -> str:
        said = "true" if isinstance(value, str) else "false"
        return f'<{mark}parameter name="{key}" string="{said}">{plain(value)}</{mark}parameter>\n'

    def one(call: Call) -> str:
        parameters = "".join(parameter(key, value) for key, value in call.arguments.items())
        return f'<{mark}invoke name="{call.name}">\n{parameters}</{mark}invoke>\n'

    return section(f"<{mark}{name}>\n", f"</{mark}{name}>", one)


def xtml(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        key = html.escape(key, quote=False)
        return f'<|open|>argument key="{key}" type="{kind_of(value)}"<|sep|>{plain(value)}<|close|>argument<|sep|>'

    def one(number: int, call: Call) -> str:
        inside = "".join(argument(key, value) for key, value in call.arguments.items())
        return f'<|open|>call tool="{call.name}" index="{number}"<|sep|>{inside}<|close|>call<|sep|>'

    written = "".join(one(number, call) for number, call in enumerate(calls, 1))
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


MARK = "]<]minimax[>["


def elements(value: Any) -> str:
    match value:
        case dict():
            return "".join(f"{MARK}<{key}>{elements(each)}{MARK}</{key}>" for key, each in value.items())
        case list():
            return "".join(f"{MARK}<item>{elements(each)}{MARK}</item>" for each in value)
    return plain(value)


def minimax_m3(calls: list[Call]) -> str:
    written = "".join(f'{MARK}<invoke name="{call.name}">{elements(call.arguments)}{MARK}</invoke>\n' for call in calls)
    return f"{MARK}<tool_call>\n{written}{MARK}</tool_call>"


def cdata(value: Any) -> str:
    """Escapes strings with XML's special characters as MiniCPM5 does."""
    text = plain(value)
    return f"<![CDATA[{text}]]>" if any(sign in text for sign in "<>&\n") and "]]" not in text else text


def named_json(call: Call) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


QWEN = between_tags("<function=NAME>\nPARAMETERS</function>", "<parameter=KEY>\nVALUE\n</parameter>\n")
GLM = between_tags("NAMEPARAMETERS", "\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>")
STEP = between_tags(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">PARAMETERS</steptml:invoke>'
    "<｜tool_call_end｜>",
    '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
)
HY = between_tags(
    "<tool_call>NAME<tool_sep>PARAMETERS\n</tool_call>", "\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>"
)
MIMO = between_tags("<function=NAME>PARAMETERS</function>", "<parameter=KEY>VALUE</parameter>")
MINICPM = between_tags('<function name="NAME">PARAMETERS</function>', '<param name="KEY">VALUE</param>', value=cdata)
KEYED = section(
    "<|tools_prefix|>[",
    "]<|tools_suffix|>",
    lambda call: json.dumps({call.name: call.arguments}, ensure_ascii=False),
    ", ",
)


def tool_calls(one: Callable[[Call], str], around: str = "") -> Callable[[list[Call]], str]:
    return lambda calls: "\n".join(f"<tool_call>{around}{one(call)}{around}</tool_call>" for call in calls)


def each_begun(begin: str) -> Callable[[list[Call]], str]:
    return lambda calls: "".join(f"{begin}{named_json(call)}" for call in calls)


@dataclass(frozen=True)
class Writer:
    """Writes calls, reasoning and answers as a format's model does."""

    calls: Callable[[list[Call]], str]
    reasoning: str = ""  # the reasoning parser's name
    thought: tuple[str, str] = ("<think>", "</think>")
    answer: tuple[str, str] = ("", "")
    prompt_end: str = ""


WRITERS = {
    "apertus": Writer(KEYED, "apertus", ("<|inner_prefix|>", "<|inner_suffix|>")),
    "deepseek_v32": Writer(dsml("function_calls"), "deepseek_v3", prompt_end="<think>"),
    "deepseek_v4": Writer(dsml("tool_calls"), "deepseek_v4"),
    "deepseek_v41": Writer(dsml("calls", " "), "deepseek_v41"),
    "gigachat3": Writer(each_begun("<|function_call|>"), "qwen3"),
    "hy_v3": Writer(section("<tool_calls>\n", "\n</tool_calls>", HY, "\n"), "hy_v3"),
    "kimi_k3": Writer(
        xtml,
        "kimi_k3",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "ling3": Writer(tool_calls(GLM), "ling3"),
    "mimo": Writer(tool_calls(MIMO), "mimo"),
    "minicpm5": Writer(section("", "", MINICPM), "qwen3"),
    "minimax_m3": Writer(minimax_m3, "minimax_m3", ("<mm:think>", "</mm:think>")),
    "poolside_v1": Writer(tool_calls(GLM), "poolside_v1", prompt_end="<think>"),
    "step3": Writer(section("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", STEP), "step3"),
    "step3p5": Writer(tool_calls(QWEN, "\n"), "step3p5"),
}
