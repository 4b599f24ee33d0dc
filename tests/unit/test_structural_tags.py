"""Structural tags in vLLM's current form: texts that each format permits, and invalid tags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pd_cluster.errors import GuideError, RequestError
from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.text.grammar import Compiler
from pd_cluster.types import Guide
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, make_tokenizer

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", ANY, "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more}


def separated(**more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": ",", "tags": [tag("[", NUMBER, "]")], **more}


def guide_of(form: Any) -> Guide:
    body = {"prompt": "a", "response_format": {"type": "structural_tag", "format": form}}
    asked = checked(body, CompletionRequest).asked
    assert asked is not None
    return asked.guide


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Returns a compiler whose tokens are bytes."""
    file = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    make_tokenizer().save(str(file))
    return Compiler(file, VOCAB_SIZE, {EOS_ID})


def is_whole(compiler: Compiler, guide: Guide, text: str) -> bool:
    """Whether the guide permits this text and its end."""
    matcher, words = compiler.compile(guide), np.zeros(compiler.num_words, dtype=np.uint32)
    try:
        matcher.take(make_tokenizer().encode(text, add_special_tokens=False).ids)
        matcher.write_mask(words)
    except GuideError:
        return False
    return bool((words & compiler.end_words).any())


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"type": "const_string", "value": "yes"}, ["yes"], ["", "no", "yes!"]),
        (NUMBER, ["7", "-12"], ["x", '"7"']),
        ({"type": "regex", "pattern": "a+b"}, ["ab", "aab"], ["b", "abb"]),
        ({"type": "grammar", "grammar": 'start: "x" start "y" | "z"'}, ["z", "xzy"], ["xz"]),
        (ANY, ["", "anything <f=a>"], []),
        ({"type": "sequence", "elements": [NUMBER, {"type": "const_string", "value": "!"}]}, ["7!"], ["7", "!"]),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, ANY]}, ["a", "ab c"], ["b"]),
        ({"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "no"}]}, ["7", "no"], ["x"]),
        (tag("<a>", NUMBER, "</a>"), ["<a>7</a>"], ["<a>x</a>", "7", "<a>7"]),
        (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>b <c</a>"], ["<a>b", "<a></a>x"]),
        (tag("<a>", ANY, ["</a>", ";"]), ["<a>b</a>", "<a>b;"], ["<a>b", "<a>b;c"]),
        (tag("<a>", tag("<b>", NUMBER, "</b>"), "</a>"), ["<a><b>7</b></a>"], ["<a>7</a>"]),
        (
            triggered(),
            ["", "so", "so <f=a>7</f> and <f=b>x</f>.", "<f=a>7</f>"],
            ["<f=a>x</f>", "<f=c>7</f>", "<f=a>7"],
        ),
        (triggered(at_least_one=True), ["<f=a>7</f>", "<f=a>7</f> and <f=b>x</f>."], ["", "so <f=a>7</f>"]),
        (triggered(stop_after_first=True), ["so", "so <f=a>7</f>"], ["<f=a>7</f>.", "<f=a>7</f><f=b>x</f>"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<f=b>x</f>"], ["", "so", "<f=a>7</f>."]),
        (separated(), ["", "[7]", "[7],[8]"], ["[7][8]", "[x]", "[7],"]),
        (separated(at_least_one=True), ["[7]"], [""]),
        (separated(stop_after_first=True), ["", "[7]"], ["[7],[8]"]),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_what_a_format_lets_through(compiler: Compiler, form: Any, good: list[str], bad: list[str]) -> None:
    guide = guide_of(form)
    assert [text for text in good if not is_whole(compiler, guide, text)] == []
    assert [text for text in bad if is_whole(compiler, guide, text)] == []


def test_it_begins_behind_reasoning(compiler: Compiler) -> None:
    for form in (tag("<a>", NUMBER, "</a>"), {"type": "grammar", "grammar": 'start: "<a>7</a>"'}):
        guide = ReplyFormat("", "qwen3").guide([], "none", "", None, guide_of(form))
        assert guide is not None
        assert is_whole(compiler, guide, "<think>\nsix or 7</think>\n\n<a>7</a>")
        assert not is_whole(compiler, guide, "<think>\nsix or 7</think>\n\n7")


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ({}, "format.type: None"),
        ({"type": "qwen_xml_parameter"}, "format.type: 'qwen_xml_parameter'; known are const_string"),
        ({"type": "const_string", "value": ""}, "format.value: must be a string"),
        ({"type": "json_schema", "json_schema": []}, "format.json_schema: a schema"),
        ({"type": "sequence", "elements": []}, "format.elements: must be a list"),
        ({"type": "sequence", "elements": [ANY, NUMBER]}, "format.elements[0]: any_text has no end"),
        ({"type": "or", "elements": [{"type": "x"}]}, "format.elements[0].type: 'x'"),
        (tag("<a>", ANY, ""), "format.end: must be a string"),
        ({**ANY, "excludes": ["a"]}, "format.excludes: not supported for any_text"),
        (triggered(triggers=["<g="]), "format.tags[0].begin: '<f=a>' begins with none of the triggers"),
    ],
)
def test_a_format_that_cannot_be_read_names_the_place(form: Any, what: str) -> None:
    with pytest.raises(RequestError) as caught:
        guide_of(form)
    assert str(caught.value).startswith(f"response_format.{what}"), str(caught.value)
    assert caught.value.param == "response_format"


def test_a_tree_of_formats_has_limits() -> None:
    deep: Any = NUMBER
    for _ in range(20):
        deep = {"type": "or", "elements": [deep]}
    for form in (deep, {"type": "or", "elements": [NUMBER] * 2000}):
        with pytest.raises(RequestError, match="at most 1024 formats, nested 16 deep, are allowed"):
            guide_of(form)
