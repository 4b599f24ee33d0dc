"""Guides of formats with JSON, Python or Gemma's braces accept what models usually write, and reject other values."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.parsers.format_table import CALL_ALIASES
from pd_cluster.parsers.reply_format import ReplyFormat, Tool
from tests.support.format_replies import TOOLS, Call
from tests.support.json_writers import JSON_WRITERS
from tests.unit.test_tool_guides import World, calls_of, must_fit

PARSERS = sorted(set(JSON_WRITERS) - {*CALL_ALIASES})
STRICT = [Tool(tool.name, tool.parameters, strict=True) for tool in TOOLS]
BRACES = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}
BEGINS = ["", "[TOOL_CALLS]", "<tool_call>", "```json\n", "<think>So [1].</think>\n", "So: ```json\n"]
STOP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["bus", "tram", 3, None]},
        "at": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
        "codes": {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[A-Z]{2}$"}},
        "more": {},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "next": {"$ref": "#/$defs/place"}},
            "required": ["x"],
        }
    },
}


@pytest.fixture(scope="module", params=["text", "special"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    markers = sorted({mark for name in JSON_WRITERS for mark in ReplyFormat(name).markers if mark != "functools"})
    return World(tmp_path_factory.mktemp(request.param), request.param, markers)


@pytest.mark.parametrize("parser", PARSERS)
def test_what_a_model_writes_by_itself_may_follow(world: World, parser: str) -> None:
    """Guides permit a model's usual calls after content, except nested values, which they write as JSON."""
    form, writer = ReplyFormat(parser), JSON_WRITERS[parser]
    required, optional = form.guide(STRICT, "required", ""), form.guide(STRICT, "auto", "")
    for calls in (
        [Call("now", {})],
        [Call("book", {"city": "Bonn", "days": 3})],
        [Call("book", {"city": "Bonn"}), Call("now", {"zone": "CET"})],
    ):
        text = writer.calls(calls)
        if parser != "xlam":  # with required calls, the reply has nothing else
            assert world.verdict(required, text) == "whole", text
        assert world.verdict(optional, text) == "whole", text
        assert world.verdict(optional, f"Let me look.\n{text}") == "whole", text


@pytest.mark.parametrize("parser", BRACES)
def test_values_in_braces_follow_their_schema(world: World, parser: str) -> None:
    begin, end, quote = BRACES[parser]
    guide = ReplyFormat(parser).guide([Tool("go", STOP)], "required", "", 1)
    assert guide is not None

    def verdict(inner: str) -> bool:
        return world.verdict(guide, f"{begin}call:go{{{inner}}}{end}") == "whole"

    for good in (
        "name:'a }b'",
        "kind:3,name:''",
        "at:[1, 2],kind:'bus',name:'a',next:null",
        "name:'a',next:{x:1.5}",
        "name:'a',next:{next:{next:{x:0},x:1},x:2}",
        "codes:{one:'AB',two:'CD'},name:'a'",
        "more:[1,{a:'x',b:[[{c:{d:{}}}]]}],name:'a'",
    ):
        assert verdict(good.replace("'", quote)), good
    for bad in (
        "",
        "kind:3",
        "name:3",
        "kind:'ship',name:'a'",
        "at:[],name:'a'",
        "at:[1,2,3],name:'a'",
        "name:'a',next:{}",
        "codes:{one:'abc'},name:'a'",
        "name:'a',other:1",
    ):
        assert not verdict(bad.replace("'", quote)), bad
    form = ReplyFormat(parser)
    for seed in range(12):
        text = world.walk(guide, random.Random(seed), [quote])
        reader = form.reader("required", "", None, [Tool("go", STOP)])
        must_fit(calls_of([*reader.feed(text), *reader.finish()]), [Tool("go", STOP)])


@pytest.mark.parametrize("parser", BRACES)
@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"properties": {"a": {"type": "object", "minProperties": 1}}}, "minProperties of a"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems of a"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "pattern of a"),
        ({"properties": {"a": {"allOf": [{}]}}}, "allOf of a"),
        ({"properties": {"a": {"enum": [[1]]}}}, "an object or a list among the values of a"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
    ],
)
def test_a_schema_that_braces_cannot_follow_is_refused_by_name(parser: str, schema: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=f"parameters of 'h': .*{what}") as caught:
        ReplyFormat(parser).guide([Tool("h", schema)], "required", "")
    assert caught.value.param == "tools"
    assert ReplyFormat(parser).guide([Tool("h", schema)], "auto", "") is None  # not strict: nothing to enforce


@pytest.mark.parametrize("begin", BEGINS)
def test_whatever_announces_a_call_of_xlam_is_followed_by_one(world: World, begin: str) -> None:
    guide = ReplyFormat("xlam").guide(STRICT, "auto", "")
    end = {"<tool_call>": "</tool_call>", "```json\n": "\n```", "So: ```json\n": "\n```"}.get(begin, "")
    assert world.verdict(guide, f'{begin}[{{"name": "book", "arguments": {{"days": 1}}}}]{end}') == "whole"
    assert world.verdict(guide, f'{begin}[{{"name": "book", "arguments": {{"days": "1"}}}}]{end}') != "whole"
    assert world.verdict(guide, f'{begin}[{{"name": "h", "arguments": {{}}}}]{end}') != "whole"
    assert world.verdict(guide, "It is `x` <b> [1].") == "whole"
