"""Random walks through guides in many models' markup: the parser finds everything that they permit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.parsers.format_table import CALL_ALIASES, FORMATS, begins_of
from pd_cluster.parsers.reply_format import ReplyFormat, Tool, ToolChoice
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.parsers.xml_markup import XmlCalls
from pd_cluster.text.tokenizer import Tokenizer as TextTokenizer
from tests.support.json_writers import JSON_WRITERS
from tests.unit.test_parsers_families import CASES
from tests.unit.test_tool_guides import ADDER, World, calls_of, content_of, must_fit

PARSERS = sorted({*CASES, *JSON_WRITERS} - {*CALL_ALIASES})
XML = [name for name in PARSERS if isinstance(FORMATS[name], XmlCalls)]
BOOKER: dict[str, Any] = {
    "type": "object",
    "description": "Books a trip.",
    "properties": {
        "to": {"type": "string", "minLength": 1, "maxLength": 6},
        "how": {"enum": ["by train", "on foot"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]/x$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "back": {"type": ["boolean", "null"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
    },
    "required": ["to", "days"],
    "additionalProperties": False,
    "$defs": {"stop": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "additionalProperties": False}},
}
TOOLS = [Tool("book", BOOKER, strict=True), Tool("add", ADDER, strict=True), Tool("free-1.x", {})]
REASONING = ("granite", "hunyuan_a13b", "mistral", "seed_oss", "gemma", "ernie45", "kimi_k2", "kimi_k3", "minimax_m3")
TOKENS = {  # tokens of which these models' tags consist
    "deepseek_v4": ["｜DSML｜"],
    "deepseek_v41": ["｜DSML｜"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "minimax_m3": ["]<]minimax[>["],
}


@pytest.fixture(scope="module", params=["text", "special"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    formats = [ReplyFormat(name).markers for name in PARSERS] + [ReplyFormat("", name).markers for name in REASONING]
    markers = sorted({mark for each in formats for mark in each if " " not in mark and mark != "functools"})
    return World(tmp_path_factory.mktemp(request.param), request.param, markers)


def parts_of(form: ReplyFormat, text: str) -> list[Part]:
    reader = form.reader("auto", "", None, TOOLS)
    return [*reader.feed(text), *reader.finish()]


@pytest.mark.parametrize("parser", PARSERS)
def test_required_calls_are_found_and_fit_their_schemas(world: World, parser: str) -> None:
    form = ReplyFormat(parser, "qwen3")
    num_calls = 0
    for seed in range(96):
        most = [None, 1, 3][seed % 3]
        guide = form.guide(TOOLS[:2], "required", "", most)
        assert guide is not None
        text = world.walk(guide, random.Random(seed), ["</think>"])
        parts = parts_of(form, text)
        calls = calls_of(parts)
        assert 1 <= len(calls) <= (most or 16), text
        assert content_of(parts) == "", text
        must_fit(calls, TOOLS)
        num_calls += len(calls)
        if num_calls > seed + 1 and seed >= 4:
            return
    raise AssertionError("there must be at most one call")


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_in_free_text_fit_where_a_tool_is_strict(world: World, parser: str) -> None:
    """Calls to strict tools satisfy their schemas; without parallel calls there is at most one."""
    form = ReplyFormat(parser)
    marks = sorted(mark for mark in form.markers if mark.startswith(("<", "]<")))
    others = filter(None, (*begins_of(FORMATS[parser]), getattr(FORMATS[parser], "close", "")))
    goals = [*dict.fromkeys((*marks, *others)), "text ", " {", "functools", "functools[", *("[" for _ in range(6))]
    guide, once = form.guide(TOOLS, "auto", ""), form.guide(TOOLS[:2], "auto", "", 1)
    assert guide is not None
    assert once is not None
    for seed in range(4):
        assert len(calls_of(parts_of(form, world.walk(once, random.Random(seed), goals)))) <= 1
    num_calls = 0
    for seed in range(64):
        parts = parts_of(form, world.walk(guide, random.Random(seed), goals))
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        for at, name in enumerate(names):
            if name in ("book", "add"):
                text = "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == at)
                must_fit([(name, json.loads(text))], TOOLS)
        num_calls += len(names)
        if num_calls >= 4 and seed >= 4:
            return
    raise AssertionError(f"{parser}: only {num_calls} calls")


@pytest.fixture(scope="module")
def internlm(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Returns a world with a tokenizer like InternLM2's, in which two tokens together begin a call."""
    marks = ["<|action_start|>", "<|action_end|>", "<|plugin|>", "<|interpreter|>"]
    return World(tmp_path_factory.mktemp("internlm"), "special", marks)


def test_two_tokens_begin_a_call(internlm: World) -> None:
    form = ReplyFormat("internlm")
    begin = '<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1, "b": '
    ways: tuple[tuple[ToolChoice, str], ...] = (("required", ""), ("auto", "I shall add."))
    for choice, before in ways:
        guide = form.guide(TOOLS[:2], choice, "")
        assert internlm.verdict(guide, f"{before}{begin}22}}}}<|action_end|>") == "whole"
        assert internlm.verdict(guide, f'{before}{begin}"22"}}}}<|action_end|>') == before + begin
        assert internlm.verdict(guide, f"{before}<|action_start|><|interpreter|>") == f"{before}<|action_start|>"
    assert internlm.verdict(form.guide(TOOLS[:2], "auto", ""), "no call") == "whole"
    for seed in range(8):
        guide = form.guide(TOOLS[:2], "required", "", 2)
        assert guide is not None
        must_fit(calls_of(parts_of(form, internlm.walk(guide, random.Random(seed), [" {"]))), TOOLS)


def test_two_tokens_that_begin_a_call_reach_its_reader(internlm: World, tmp_path: Path) -> None:
    """Special tokens are omitted from text, except those that the parser needs."""
    internlm.tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer, form = TextTokenizer(tmp_path), ReplyFormat("internlm")
    shown = tokenizer.detokenizer(True, form.markers)
    ids = internlm.ids('a<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|><eos>')
    assert parts_of(form, "".join(map(shown.add, ids)) + shown.finish()) == [
        *(Content("a"), CallBegin(0, "f"), CallArguments(0, "{}"))
    ]


@pytest.mark.parametrize("parser", TOKENS)
def test_tags_of_several_tokens_are_guided(parser: str, tmp_path: Path) -> None:
    world, form = World(tmp_path, "special", TOKENS[parser]), ReplyFormat(parser)
    text, parts = CASES[parser][0]
    city = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "list": {"type": "array"}}}
    given = [Tool("f", {**city, "required": ["city", "days"]}, strict=True), Tool("g", {}, strict=True)]
    guide = form.guide(given, "auto", "")
    whole = text.replace("007", "7")
    assert world.verdict(guide, whole.rstrip("\n")) == "whole", parts
    assert world.verdict(guide, "no call") == "whole"
    if parser == "kimi_k3":  # with the markers around its answer
        assert world.verdict(guide, CASES[parser][1][0]) == "whole"
    for wrong in (whole.replace("days", "hours", 1), whole.replace('"f"', '"h"')):
        refused = world.verdict(guide, wrong)
        assert wrong.startswith(refused)
        assert refused not in ("", wrong)
    for seed in range(8):
        guide = form.guide(TOOLS[:2], "required", "", 2)
        assert guide is not None
        written = world.walk(guide, random.Random(seed), [" {"])
        must_fit(calls_of(parts_of(form, written)), TOOLS)


@pytest.mark.parametrize("text", ["import functools\n", "functools.reduce(f, [1])", "a functools [{}]", "functools"])
def test_a_word_that_may_begin_calls_is_one_in_other_texts(world: World, text: str) -> None:
    form = ReplyFormat("phi4_mini")
    assert world.verdict(form.guide(TOOLS, "auto", ""), text) == "whole"
    assert parts_of(form, text) == [Content(text)]


def test_a_word_before_an_array_begins_calls(world: World) -> None:
    form = ReplyFormat("phi4_mini")
    guide = form.guide(TOOLS, "auto", "")
    one = '{"name": "add", "arguments": {"a": 1, "b": 22}}'
    for calls in (f"[{one}]", f"[ {one} ]", f"[{one}, {one}]", f"[{one},\n{one}]"):
        text = f"So: functools{calls}"
        assert world.verdict(guide, text) == "whole"
        assert len(calls_of(parts_of(form, text))) == calls.count("name")
    assert world.verdict(guide, f"functools[{one}") == "begun"
    assert world.verdict(guide, "functools[1]") == "functools["
    once = form.guide(TOOLS, "auto", "", 1)
    assert world.verdict(once, f"functools[{one}]") == "whole"
    assert world.verdict(once, f"functools[{one},") == f"functools[{one}"


@pytest.mark.parametrize("parser", sorted(CASES))
def test_the_card_s_own_example_may_follow(world: World, parser: str) -> None:
    """Guides permit a model's usual output: each format's first case, with arguments of all types."""
    free = [Tool("f", {}), Tool("g-x.y" if parser == "kimi_k2" else "g", {})]
    if parser in ("glm45", "glm47"):
        free[0] = Tool("f", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    guide = ReplyFormat(parser).guide(free, "required", "")
    for text, parts in CASES[parser][:1]:
        marks = (*begins_of(FORMATS[parser]), *FORMATS[parser].markers)
        calls = text[min((text.index(mark) for mark in marks if mark in text), default=0) :]
        assert world.verdict(guide, calls.rstrip("\n")) == "whole", (calls, parts)


@pytest.mark.parametrize("parser", XML)
@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "pattern of a"),
        ({"properties": {"a": {"type": "string", "contentEncoding": "base64"}}}, "contentEncoding of a"),
    ],
)
def test_a_schema_that_tags_cannot_follow_is_refused_by_name(parser: str, schema: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=f"parameters of 'h': {what}") as caught:
        ReplyFormat(parser).guide([Tool("h", schema)], "required", "")
    assert caught.value.param == "tools"
    assert ReplyFormat(parser).guide([Tool("h", schema)], "auto", "") is None  # not strict: nothing to enforce


@pytest.mark.parametrize("reasoning", REASONING)
def test_reasoning_is_guided_in_its_own_marks(world: World, reasoning: str) -> None:
    form = ReplyFormat("hunyuan_a13b", reasoning)
    guide = form.guide(TOOLS[1:2], "required", "", 1)
    assert guide is not None
    goals = sorted(
        mark for mark in form.markers if mark.startswith(("</", "[/", "<channel", "<|close", "Here is my resp"))
    )
    for seed in range(6):
        text = world.walk(guide, random.Random(seed), goals)
        parts = parts_of(form, text)
        assert len(calls_of(parts)) == 1, text
        assert {type(part) for part in parts} <= {Reasoning, CallBegin, CallArguments}, text
