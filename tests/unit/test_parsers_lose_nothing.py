"""Every word that a model writes appears in content, reasoning or a call, in every format, even with damaged markup.

Texts have words such as `w3x` at every place for a model's own words: around calls, in names, keys and values, between
parameters. Words that remain in a damaged text must be in one of the parts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator

import pytest

from pd_cluster.parsers.format_table import CALL_ALIASES, FORMATS
from pd_cluster.parsers.reply_format import ReplyFormat, Tool
from pd_cluster.parsers.reply_parts import CallBegin
from tests.support.format_replies import Call
from tests.support.json_writers import JSON_WRITERS
from tests.unit.test_parsers import read

NUM_DAMAGED = 30  # damaged texts of each kind and format
WORD = re.compile(r"w[0-9]+x")
BORDER = re.compile(r"(?<=[<>{}\[\](),:=|\"'`\s｜])|(?=[<>{}\[\](),:=|\"'`\s｜])")
PIECE = re.compile(r"</?[^<>\s]*>?|[{}\[\](),:=\"'`]|w[0-9]+x|\S+")
TOOLS = [
    Tool(
        "w1x",
        {
            "type": "object",
            "properties": {"w2x": {"type": "string"}, "w4x": {"type": "integer"}, "note": {"type": "string"}},
        },
    )
]
ARGUMENTS = '{"w2x": "w3x </b> w5x", "w4x": [5, "w6x"]}'


def tagged(form: str, key: str, close: str, newline: str = "\n") -> str:
    """Returns a call with two parameters. `form` has a place for the parameters, `key` for a parameter's name."""
    parameters = "\n".join(
        f"{key.format(name)}{newline}{value}{newline}{close}"
        for name, value in (("w2x", "w3x </b> w5x"), ("w4x", "w6x"))
    )
    return form.format(f"\n{parameters}\n")


QWEN = tagged("<function=w1x>{}</function>", "<parameter={}>", "</parameter>")
GLM = tagged("w1x{}", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "")
MINIMAX = tagged('<invoke name="w1x">{}</invoke>', '<parameter name="{}">', "</parameter>", "")
OBJECT = f'{{"name": "w1x", "arguments": {ARGUMENTS}}}'
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>w1x\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>w1x<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
KIMI = f"<|tool_call_begin|>functions.w1x:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
PYTHON = """[w1x(w2x='w3x (w5x', w4x=[5, "w6x"]), w1x()]"""
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OBJECT}\n</tool_call>"
QWEN_XML = f"<tool_call>\n{QWEN}\n</tool_call>\n<tool_call>\n{QWEN}\n</tool_call>"
STEP = tagged(
    '<steptml:invoke name="w1x">{}</steptml:invoke>', '<steptml:parameter name="{}">', "</steptml:parameter>", ""
)
STEP_CALL = f"<｜tool_call_begin｜>function<｜tool_sep｜>{STEP}<｜tool_call_end｜>"
HY = tagged("<tool_call>w1x<tool_sep>{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "")
MINICPM = (
    tagged('<function name="w1x">{}</function>', '<param name="{}">', "</param>", "")
    .replace("w3x", "<![CDATA[w3x")
    .replace("w5x", "w5x]]>")
)
XTML = tagged(
    '<|open|>call tool="w1x" index="1"<|sep|>{}<|close|>call<|sep|>',
    '<|open|>argument key="{}" type="string"<|sep|>',
    "<|close|>argument<|sep|>",
    "",
)
ELEMENTS = "]<]minimax[>[<{0}>{1}]<]minimax[>[</{0}>"
ELEMENT = ELEMENTS.format("note", "w3x </b> w5x") + ELEMENTS.format("free", ELEMENTS.format("item", "w6x"))
M3 = f']<]minimax[>[<invoke name="w1x">{ELEMENT}]<]minimax[>[</invoke>\n'
KEYED = f'{{"w1x": {ARGUMENTS}}}'


def dsml(section: str, gap: str = "") -> str:
    mark = f"｜DSML｜{gap}"
    one = tagged(
        f'<{mark}invoke name="w1x">{{}}</{mark}invoke>',
        f'<{mark}parameter name="{{}}" string="true">',
        f"</{mark}parameter>",
        "",
    )
    return f"<{mark}{section}>\n{one}\n{one}\n</{mark}{section}>"


CALLS = {  # as in the model cards
    "apertus": f"<|tools_prefix|>[{KEYED}, {KEYED}]<|tools_suffix|>",
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "gigachat3": f"<|function_call|>{OBJECT}<|function_call|>{OBJECT}",
    "hy_v3": f"<tool_calls>\n{HY}\n{HY}\n</tool_calls>",
    "kimi_k3": f"<|open|>tools<|sep|>{XTML}{XTML}<|close|>tools<|sep|>",
    "minicpm5": f"{MINICPM}\n{MINICPM}",
    "minimax_m3": f"]<]minimax[>[<tool_call>\n{M3}{M3}]<]minimax[>[</tool_call>",
    "step3": f"<｜tool_calls_begin｜>{STEP_CALL}{STEP_CALL}<｜tool_calls_end｜>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>",
    "glm45": f"<tool_call>{GLM}</tool_call>\n<tool_call>{GLM}</tool_call>",
    "granite": f"<|tool_call|>[{OBJECT}, {OBJECT}]",
    "hermes": HERMES,
    "hunyuan_a13b": f"<tool_calls>[{OBJECT}, {OBJECT}]</tool_calls>",
    "internlm": f"<|action_start|><|plugin|>{OBJECT}<|action_end|>",
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>",
    "llama3_json": f"{OBJECT}; {OBJECT}",
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "minimax_m2": f"<minimax:tool_call>\n{MINIMAX}\n{MINIMAX}\n</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]",
    "openai": f"<|channel|>commentary to=functions.w1x <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "phi4_mini": f"functools[{OBJECT}, {OBJECT}]",
    "pythonic": PYTHON,
    "qwen3_coder": QWEN_XML,
    "seed_oss": QWEN_XML.replace("tool_call>", "seed:tool_call>").replace("</seed:", "</seed:"),
}
CALLS |= dict.fromkeys(("glm47", "ling3", "poolside_v1"), CALLS["glm45"])
CALLS |= dict.fromkeys(("mimo", "step3p5"), QWEN_XML)
CALLS |= {"granite4": HERMES, "qwen3": HERMES, "qwen3_xml": QWEN_XML}
CALLS |= {
    name: writer.calls([Call("w1x", json.loads(ARGUMENTS))] * 2).replace('"tool_call_id": "0", ', "")
    for name, writer in JSON_WRITERS.items()
}
REASONING = {"openai": "openai_gptoss"}


def around(parser: str, calls: str) -> str:
    if parser == "openai":
        thought = "<|channel|>analysis<|message|>w7x.<|end|><|start|>assistant"
        return f"{thought}{calls}<|start|>assistant<|channel|>final<|message|>w9x."
    before = "" if "pythonic" in parser else "w8x. "
    return f"<think>w7x</think>\n\n{before}{calls}\nw9x."


def cut_short(text: str, rng: random.Random) -> Iterator[str]:
    yield from (text[:at] for at in rng.sample(range(len(text)), min(NUM_DAMAGED, len(text))))


def with_a_piece_missing(text: str, rng: random.Random) -> Iterator[str]:
    found = list(PIECE.finditer(text))
    for piece in rng.sample(found, min(NUM_DAMAGED, len(found))):
        yield text[: piece.start()] + text[piece.end() :]


def with_a_word_more(text: str, rng: random.Random) -> Iterator[str]:
    """Yields the text with an added word, except in gpt-oss's headers, which are markup up to <|message|>."""
    places = [at.start() for at in BORDER.finditer(text)]
    headers = [range(at.start() + 1, at.end()) for at in re.finditer(r"<\|(channel|start)\|>.*?<\|message\|>", text)]
    places = [at for at in places if not any(at in header for header in headers)]
    for at in rng.sample(places, min(NUM_DAMAGED, len(places))):
        yield f"{text[:at]} w10x {text[at:]}"


def with_two_pieces_missing(text: str, rng: random.Random) -> Iterator[str]:
    for once in with_a_piece_missing(text, rng):
        yield next(with_a_piece_missing(once, rng))


def test_every_format_is_tried() -> None:
    assert set(CALLS) == set(FORMATS)


@pytest.mark.parametrize(
    "damaged",
    [cut_short, with_a_piece_missing, with_two_pieces_missing, with_a_word_more],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("parser", sorted(set(CALLS) - set(CALL_ALIASES)))
def test_no_word_is_lost(parser: str, damaged: Callable[[str, random.Random], Iterator[str]]) -> None:
    rng = random.Random(parser)
    form = ReplyFormat(parser, REASONING.get(parser, "qwen3"))
    text = around(parser, CALLS[parser])
    assert (
        sum(isinstance(part, CallBegin) for part in read(form, [text], tools=TOOLS)) == text.count("w1x")
        or "pythonic" in parser
    )
    for each in (text, *damaged(text, rng)):
        at = rng.randint(0, len(each))
        parts = read(form, [each[:at], each[at:]], tools=TOOLS)
        assert parts == read(form, [each], tools=TOOLS)
        shown = " ".join(str(field) for part in parts for field in part)
        assert sorted(WORD.findall(each)) == sorted(WORD.findall(shown)), each
