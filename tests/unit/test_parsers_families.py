"""Calls and reasoning as written by many models' chat templates, parsed in any split."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest

from pd_cluster.parsers.format_table import TOKEN_MARKUP
from pd_cluster.parsers.reply_format import ReplyFormat, Tool
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from tests.support.tag_cases import TAG_CASES
from tests.unit.test_parsers import call
from tests.unit.test_parsers import read as read_parts

WEATHER = Tool(
    "f",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "flag": {"type": ["boolean", "null"]},
            "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"$ref": "#/$defs/list"},
            "free": {},
        },
        "$defs": {"list": {"type": "array"}},
    },
)
TOOLS = (WEATHER, Tool("g", {}))

Cases = list[tuple[str, list[Part] | None]]


def plain(*texts: str) -> Cases:
    """Returns cases for texts without a call."""
    return [(text, [Content(text)]) for text in texts]


SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3_CALL = BEGIN + "function" + SEP + "{}\n```json\n{}\n```" + END
V3: Cases = [
    (
        ALL_BEGIN + V3_CALL.format("f", '{"a": 1}') + "\n" + V3_CALL.format("g", "{}") + ALL_END,
        [*call(0, "f", '{"a": 1}'), *call(1, "g")],
    ),
    (f"So.{ALL_BEGIN}{V3_CALL.format('f', '{oops}')}{ALL_END}", None),
    *plain(f"{ALL_BEGIN}no call"),
    (f"{ALL_BEGIN}{BEGIN}function{SEP}f", None),
]
V31: Cases = [
    (
        f'Well.{ALL_BEGIN}{BEGIN}f{SEP}{{"a": "</x>"}}{END}{BEGIN}g{SEP}{{}}{END}{ALL_END}',
        [Content("Well."), *call(0, "f", '{"a": "</x>"}'), *call(1, "g")],
    ),
    (f'{ALL_BEGIN}{BEGIN}f{SEP}{{"a": "', call(0, "f", '{"a": "')),
    (f"{BEGIN}f{SEP}{{}}{END}", call(0, "f")),
    (f"{BEGIN}f g{SEP}{{}}", [Content(f"{BEGIN}f g{SEP}{{}}")]),
]
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}"
KIMI: Cases = [
    (
        f"I look.{SECTION}"
        + "<|tool_call_end|>".join(
            [KIMI_CALL.format("f:0", '{"a": [1]}'), KIMI_CALL.format("g-x.y:12", "{}"), SECTION_END]
        ),
        [Content("I look."), *call(0, "f", '{"a": [1]}'), *call(1, "g-x.y")],
    ),
    (f"{SECTION}{SECTION_END} so", [Content(" so")]),
    (
        f"{SECTION}{KIMI_CALL.format('f:0', '{} so ')}{KIMI_CALL.format('g:1', '{oops')}{SECTION_END}.",
        [*call(0, "f"), Content(" so "), *call(1, "g", "{oops"), Content(".")],
    ),
    *plain(f"{SECTION}<|tool_call_begin|>functions.f:0"),
]


def function(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<function={name}>\n{inner}</function>"


def tagged(*functions: str) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in functions)


TYPES = {"city": "12", "flag": "True", "any": "12", "list": "[1, {}]", "free": '{"a": 1}', "other": "abc"}
TAGS = "<parameter=x>\n<tool> </function>.<function=y>"
QWEN: Cases = [
    (
        "Yes.\n" + tagged(function("f", city='New "York"\n\nUS', days="3"), function("g")),
        [Content("Yes.\n"), *call(0, "f", '{"city": "New \\"York\\"\\n\\nUS", "days": 3}'), *call(1, "g")],
    ),
    (  # types: a quoted number stays a string, and Python's literals are understood
        tagged(function("f", **TYPES)),
        call(0, "f", '{"city": "12", "flag": true, "any": "12", "list": [1, {}], "free": {"a": 1}, "other": "abc"}'),
    ),
    (f"{function('f', days='many')}.", [*call(0, "f", '{"days": "many"}'), Content(".")]),
    ("<tool_call>\n<function=f>\n<parameter=city>\nBer\nlin", call(0, "f", '{"city": "Ber\\nlin')),
    ("<tool_call>\n<function=f>\n<parameter=days>\n12", call(0, "f", '{"days": 12')),
    ("<tool_call>\n<function=f>\n</tool_call>so", [*call(0, "f"), Content("so")]),
    *plain("<tool_call>hello</tool_call>", "<function=a b>", "<function="),
    ("<tool_call>\n\n</tool_call> so", [Content(" so")]),
    (  # without end markers of values, of calls, or of both
        "<tool_call>\n<function=f>\n<parameter=days>\n3\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=city>\n"
        f"Bonn\n{tagged(function('g'))}",
        [*call(0, "f", '{"days": 3}'), *call(1, "f", '{"city": "Bonn"}'), *call(2, "g")],
    ),
    (  # two calls between one pair of markers, and misplaced text
        tagged(function("f", days="3").replace("f>", "f>\nso") + "\nand\n" + function("g")),
        [
            *(CallBegin(0, "f"), CallArguments(0, "{"), Content("so\n"), CallArguments(0, '"days": 3}')),
            *(Content("\nand\n"), *call(1, "g")),
        ],
    ),
    (tagged(function("f", city=TAGS)), call(0, "f", f'{{"city": {json.dumps(TAGS)}}}')),  # markers in a value's text
    *(  # other spellings of values in the schema
        (f"<tool_call><function=f><parameter={key}>{text}</parameter></function></tool_call>", call(0, "f", shown))
        for key, text, shown in (
            *(("flag", "TRUE", '{"flag": true}'), ("flag", "yes", '{"flag": "yes"}'), ("days", "+3", '{"days": 3}')),
            *(("days", "3.0", '{"days": 3}'), ("share", "5.0", '{"share": 5.0}')),
            *(("days", '"3"', '{"days": 3}'), ("share", ".5", '{"share": 0.5}'), ("share", "-.5e1", '{"share": -5.0}')),
            *(("list", "['a', True]", '{"list": ["a", true]}'), ("city", ".5", '{"city": ".5"}')),
            *(("any", "TRUE", '{"any": "TRUE"}'), ("free", ".5", '{"free": ".5"}')),
        )
    ),
]
SEED: Cases = [
    (text.replace("tool_call>", "seed:tool_call>").replace("</seed:", "</seed:"), parts)
    for text, parts in QWEN
    if parts is not None and "tool_call>" in text and parts[0] != Content("<tool_call>hello</tool_call>")
]
GLM: Cases = [
    (
        "Hm.<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Köln & Bonn\n</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        [Content("Hm."), *call(0, "f", '{"city": "Köln & Bonn\\n", "days": 2}'), *call(1, "g")],
    ),
    (
        "<tool_call>f<arg_key>list</arg_key><arg_value>[1]</arg_value><arg_key>any</arg_key><arg_value>null</arg_value>"
        "</tool_call>",
        call(0, "f", '{"list": [1], "any": null}'),
    ),
    ("<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Ber", call(0, "f", '{"city": "Ber')),
    (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bonn\n<arg_key>days</arg_key><arg_value>3</tool_call>\n"
        "<tool_call>g</tool_call>",
        [*call(0, "f", '{"city": "Bonn", "days": 3}'), *call(1, "g")],
    ),
    ("<tool_call>f\n<tool_call>g</tool_call>", [Content("<tool_call>f\n"), *call(0, "g")]),
    ("<tool_call>f\n<arg_key>ci", call(0, "f", '{"ci')),
    ("<tool_call>\n{}</tool_call>", [Content("<tool_call>\n{}</tool_call>")]),
]
MINIMAX: Cases = [
    (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">San "F"</parameter>\n<parameter name="list">[1]'
        '</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>\n',
        [*call(0, "f", '{"city": "San \\"F\\"", "list": [1]}'), *call(1, "g")],
    ),
    ("<minimax:tool_call>so", [Content("<minimax:tool_call>so")]),
    (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Bonn\n<parameter name="days">3</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        [*call(0, "f", '{"city": "Bonn", "days": 3}'), *call(1, "g")],
    ),
]
ONE, TWO = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
BOTH = [*call(0, "f", '{"a": 1}'), *call(1, "g")]
LISTED = """[f(city='New "York"', days=-2, flag=True, list=[1, {'a': None}], free={"b": "\\u00e9"}), g()]"""
LISTED_ARGUMENTS = (
    '{"city": "New \\"York\\"", "days": -2, "flag": true, "list": [1, {"a": null}], "free": {"b": "\\u00e9"}}'
)
LISTED_PARTS = [*call(0, "f", LISTED_ARGUMENTS), *call(1, "g")]
PYTHONIC: Cases = [
    (
        "[f(city='a', days=-2, flag=True), g()]",
        [*call(0, "f", '{"city": "a", "days": -2, "flag": true}'), *call(1, "g")],
    ),
    (f"\n{LISTED} so", [*LISTED_PARTS, Content(" so")]),
    ("[ f ( city = 'a, (b)]\\'' , days=(1, 2), ) ]", call(0, "f", '{"city": "a, (b)]\'", "days": [1, 2]}')),
    ("[f(city='\\ud800')]", call(0, "f", '{"city": "\ufffd"}')),
    *plain("[1, 2]", "[f](http://x)", "[f(x)]", "[f(", "So [g()]"),
]
TORN = [
    ("[f(city='Ber", """{"city": 'Ber"""),
    ("[f(days=2", '{"days": 2'),
    ("[f(days=x), g()] so", '{"days": x), g()] so'),
    ("[f(days={1}), g()]", '{"days": {1}), g()]'),
    ("[f(days=1, 2)]", '{"days": 1, 2)]'),
    (f"[f(days={'[' * 500}", f'{{"days": {"[" * 500}'),
]
CASES: dict[str, Cases] = {
    "deepseek_v3": V3,
    "deepseek_v31": V31,
    "glm45": GLM,
    "granite": [
        (f"<|tool_call|>[{ONE}, {TWO}]", BOTH),
        (f"<tool_call>[{ONE}]", BOTH[:2]),
        ("<|tool_call|>none", [Content("<|tool_call|>none")]),
    ],
    "granite4": [(f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", BOTH)],
    "hunyuan_a13b": [
        (f"a<tool_calls>[{ONE}, {TWO}]</tool_calls>", [Content("a"), *BOTH]),
        (f"<tool_calls>[{ONE}]</tool_calls> b", [*BOTH[:2], Content(" b")]),
        ("<tool_calls>[]</tool_calls>", []),
        (f"<tool_calls>{ONE}, {TWO}</tool_calls>", BOTH),
    ],
    "internlm": [
        ('a<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>\n', [Content("a"), *BOTH[:2]]),
        ("<|action_start|><|plugin|>x", [Content("<|action_start|><|plugin|>x")]),
    ],
    "kimi_k2": KIMI,
    "minimax_m2": MINIMAX,
    "llama4_pythonic": [
        (f"<|python_start|>{PYTHONIC[0][0]}<|python_end|>", PYTHONIC[0][1]),
        (f"<|python_start|>{LISTED}<|python_end|> so", [*LISTED_PARTS, Content(" so")]),
        *PYTHONIC,
        ("<|python_start|>so", [Content("<|python_start|>so")]),
        ("<|python_start|>[]<|python_end|> so", [Content(" so")]),
        ("<|python_start|>[f(days=x)]<|python_end|> so", [*call(0, "f", '{"days": x)]'), Content(" so")]),
    ],
    "phi4_mini": [
        (f"functools[{ONE}, {TWO}]", BOTH),
        ("import functools\nx", [Content("import functools\nx")]),
    ],
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN,
    "seed_oss": SEED,
    **TAG_CASES,
}


read = partial(read_parts, tools=TOOLS)


def cut(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("parser", CASES)
def test_calls_of_the_cards(parser: str) -> None:
    rng = random.Random(parser)
    for text, parts in CASES[parser]:
        form = ReplyFormat(parser)
        whole = read(form, [text])
        if parts is not None:
            assert whole == parts, text
        assert read(form, list(text)) == whole, text
        for _ in range(5):
            assert read(form, cut(text, rng)) == whole, text
        content = "".join(part.text for part in whole if isinstance(part, Content))
        shown = content if parser in TOKEN_MARKUP else text
        assert read(form, list(text), "none") == [Content(shown)] * bool(shown)
        if parts is not None and CallBegin(1, "g") in parts:  # a call beyond the limit leaves no trace
            less = read(form, list(text), most_calls=1)
            assert {part.index for part in less if isinstance(part, CallBegin | CallArguments)} == {0}


@pytest.mark.parametrize("parser", CASES)
def test_how_random_text_is_cut_changes_nothing(parser: str) -> None:
    rng = random.Random(parser)
    form = ReplyFormat(parser, "qwen3")
    bits = [*form.markers, *(mark[:-1] for mark in form.markers), "f", "g", "\n", " ", "{", "}", "[", "]", ONE, '"a"']
    bits += ["<function=", "<parameter=city>", "<parameter=days>", ">", "3", "functions.f:0", "```json", "é"]
    bits += [text[: rng.randint(1, len(text))] for text, _ in CASES[parser] for _ in range(3)]
    for _ in range(80):
        text = "".join(rng.choices(bits, k=rng.randint(1, 14)))
        most = rng.choice([None, 1])
        whole = read(form, [text], most_calls=most)
        assert read(form, list(text), most_calls=most) == whole, text
        assert read(form, cut(text, rng), most_calls=most) == whole, text


@pytest.mark.parametrize(("text", "arguments"), TORN)
def test_a_call_in_python_that_stops_being_one_keeps_the_rest(text: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        assert read(ReplyFormat("pythonic"), pieces) == call(0, "f", arguments)


def test_a_string_comes_as_it_is_written() -> None:
    reader = ReplyFormat("qwen3_coder").reader("auto", "", None, TOOLS)
    assert reader.feed("<tool_call>\n<function=f>") == [CallBegin(0, "f"), CallArguments(0, "{")]
    assert reader.feed("\n<parameter=city>\nBer") == [CallArguments(0, '"city": "Ber')]
    assert reader.feed("lin\n") == [CallArguments(0, "lin")]
    assert reader.feed("or</para") == [CallArguments(0, "\\nor")]
    assert reader.feed("meter>") == [CallArguments(0, '"')]


# ---- reasoning

XTML_THOUGHT = "<|open|>think<|sep|>so<|close|>think<|sep|>"
THOUGHTS = [
    ("deepseek_v3", "", "so", "", "so"),
    ("deepseek_v3", "<think>", "so</think>it is", "so", "it is"),
    ("deepseek_v3", "</think>", "it is", "", "it is"),
    ("glm45", "<|assistant|>\n", "<think>so</think>\nit is", "so", "it is"),
    ("glm45", "<think></think>\n", "it is", "", "it is"),
    ("kimi_k2", "", "<think>so</think>it is", "so", "it is"),
    ("minimax_m2", "<think>\n", "so\n</think>\n\nit is", "so", "it is"),
    ("seed_oss", "", "<seed:think>so</seed:think>it is", "so", "it is"),
    ("seed_oss", "", "it <seed:think>", "", "it <seed:think>"),
    ("granite", "", "Here is my thought process:\nso\nHere is my response:\nit is", "so", "it is"),
    ("granite", "", "Here's my thought process: so Here's my response: it is", "so", "it is"),
    ("granite", "", "Here is my cat", "", "Here is my cat"),
    ("hunyuan_a13b", "", "<think>\nso\n</think>\n<answer>\nit is\n</answer>", "so", "it is"),
    ("hunyuan_a13b", "", "<think>\n\n</think>\n<answer>\nit </answer is", "", "it </answer is"),
    ("hunyuan_a13b", "", "<answer>\nit is\n</answer>\n", "", "it is"),
    ("hunyuan_a13b", "", "it is", "", "it is"),
    ("mistral", "", "[THINK]so[/THINK]it is", "so", "it is"),
    ("gemma", "", "<|channel>thought\nso<channel|>it is", "so", "it is"),
    ("gemma", "", "it is", "", "it is"),
    ("ernie-45-vl", "<think>\n", "so\n</think>\n\nit is", "so", "it is"),
    ("ernie-45-vl", "<think>\n\n</think>\n\n", "it is", "", "it is"),
    ("ernie-45-vl", "", "<think>so</think>it is", "so", "it is"),
    ("ernie-45-vl", "", "it is", "", "it is"),
    ("ernie-45-vl-thinking", "", "so\n</think>\nit is", "so", "it is"),
    ("ernie45", "<think>\n", "so\n</think>\n\n<response>\nit is\n</response>\n", "so", "it is"),
    ("ernie45", "<think>\n", "so\n</think>\n\nit is", "so", "it is"),
    ("step3", "", "so</think>it is", "so", "it is"),
    ("olmo3", "<think>", "so\n</think>it is", "so", "it is"),
    ("apertus", "", "<|inner_prefix|>so<|inner_suffix|>it is", "so", "it is"),
    ("deepseek_v4", "<think>", "so</think>it is", "so", "it is"),
    ("deepseek_v41", "</think>", "it is", "", "it is"),
    ("deepseek_v4", "<think>", "so\n\n<｜DSML｜tool_calls>", "so", "<｜DSML｜tool_calls>"),
    ("hy_v3", "<think>", "so\nfar</think>it is", "so\nfar", "it is"),
    ("kimi_k3", "", f"{XTML_THOUGHT}<|open|>response<|sep|>it is", "so", "it is"),
    ("kimi_k3", "", f"{XTML_THOUGHT}<|open|>response<|sep|>it is<|close|>response<|sep|>", "so", "it is"),
    ("kimi_k3", "", "it is<|close|>response<|sep|>\n<|close|>message<|sep|>", "", "it is"),
    ("kimi_k3", "", "it is<|close|>message<|sep|>", "", "it is"),
    ("kimi_k3", "<|open|>think<|sep|>", "so <|open|>response<|sep|>", "so <|open|>response<|sep|>", ""),
    ("ling3", "<think>", "only reasoning", "only reasoning", ""),
    ("mimo", "", "<think>so</think>it is", "so", "it is"),
    ("minimax_m3", "", "<mm:think>so</mm:think>it is", "so", "it is"),
    ("minimax_m3", "", "</mm:think>it is", "", "it is"),
    ("minimax_m3", "", "it</mm:think>is", "", "itis"),
    ("minimax_m3", "<mm:think>", "so</mm:think>it is", "so", "it is"),
    ("poolside_v1", "", "it is", "", "it is"),
    ("step3p5", "", "so\n</think>\nit is", "so", "it is"),
]


@pytest.mark.parametrize(("parser", "prompt_end", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_of_the_cards(parser: str, prompt_end: str, text: str, reasoning: str, content: str) -> None:
    expected = [Reasoning(reasoning)] * bool(reasoning) + [Content(content)] * bool(content)
    form = ReplyFormat("", parser)
    rng = random.Random(text)
    assert read(form, [text], prompt_end=prompt_end) == expected
    assert read(form, list(text), prompt_end=prompt_end) == expected
    for _ in range(20):
        assert read(form, cut(text, rng), prompt_end=prompt_end) == expected


@pytest.mark.parametrize(
    "parser", ["qwen3_coder", "glm45", "kimi_k2", "deepseek_v31", "minimax_m2", "minimax_m3", "seed_oss", "hy_v3"]
)
def test_calls_of_every_markup_end_reasoning_that_is_never_closed(parser: str) -> None:
    text, parts = CASES[parser][0]
    assert parts is not None
    at = 0 if parser == "minimax_m2" else 1
    before = "".join(part[-1] for part in parts[:at])
    form = ReplyFormat(parser, "deepseek_r1")
    tools = () if parser == "kimi_k2" else TOOLS  # its second call names no tool
    for pieces in ([f"<think>so {text}"], [f"so {text}"], list(f"<think>so {text}")):
        assert read(form, pieces, tools=tools) == [Reasoning(f"so {before}".strip()), *parts[at:]]
        closed = [*pieces, "</think>", "Hi"]
        assert read(form, closed, tools=tools) == [Reasoning(f"so {text}".strip()), Content("Hi")]


def test_calls_within_an_answer() -> None:
    text = f"<think>\nso\n</think>\n<answer>\nI look.\n<tool_calls>[{ONE}]</tool_calls>\n</answer>"
    form = ReplyFormat("hunyuan_a13b", "hunyuan_a13b")
    expected = [Reasoning("so"), Content("I look.\n"), *BOTH[:2]]
    assert read(form, list(text)) == read(form, [text]) == expected
