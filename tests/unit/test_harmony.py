"""gpt-oss's replies with channels for reasoning, answers and calls, parsed in any pieces, and guided."""

from __future__ import annotations

import json
import random

import pytest

from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.parsers.reply_format import ReplyFormat, Tool, ToolChoice
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.types import Guide
from tests.unit.test_parsers import call, joined
from tests.unit.test_parsers_families import cut
from tests.unit.test_tool_guides import ADDER, World, calls_of, must_fit
from tests.unit.test_tool_guides_families import BOOKER

NEXT, THOUGHT = "<|start|>assistant", "<|channel|>analysis<|message|>"
FINAL, TO_F = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
OPEN = "<|start|>assistant"
CASES: list[tuple[str, list[Part]]] = [  # texts after OPEN
    (f"{THOUGHT}I see.<|end|>{NEXT}{FINAL}Hi <b> there<|return|>", [Reasoning("I see."), Content("Hi <b> there")]),
    (f"{FINAL}Hi", [Content("Hi")]),
    (
        f'{THOUGHT}One.\n<|end|>{NEXT}{THOUGHT}Two.<|end|>{NEXT}{TO_F}{{"a": "<|end|>"}}<|call|>',
        [Reasoning("One.\nTwo."), *call(0, "f", '{"a": "<|end|>"}')],
    ),
    (
        f" to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>{NEXT}{TO_F}<|call|>",
        [*call(0, "f"), *call(1, "f")],
    ),
    (
        f'<|channel|>commentary<|message|>I look.<|end|>{NEXT}{TO_F}{{"a": 1}} ',
        [Content("I look."), *call(0, "f", '{"a": 1}')],
    ),
    (f"{TO_F}{{oops}}<|call|>", call(0, "f", "{oops}")),
    (f"<|channel|>analysis to=python<|message|>1+1<|end|>{NEXT}{FINAL}2", [Reasoning("1+1"), Content("2")]),
    ("to=5", [Content("to=5")]),
    ("<|channel|>ana", []),
    (f"{FINAL}a<|end|>{NEXT}{FINAL}b", [Content("a\nb")]),
]
BEGUN: list[tuple[str, str, list[Part]]] = [
    (f"{OPEN}{THOUGHT}", f"So<|end|>{NEXT}{FINAL}Hi", [Reasoning("So"), Content("Hi")]),
    (f"{OPEN}{FINAL}", "Hi", [Content("Hi")]),
]
TOOLS = [Tool("book", BOOKER, strict=True), Tool("add", ADDER, strict=True)]
ANSWER = Guide("json", '{"type":"object","properties":{"yes":{"type":"boolean"}},"required":["yes"]}')


def harmony() -> ReplyFormat:
    return ReplyFormat("openai", "openai_gptoss")


def read(pieces: list[str], choice: ToolChoice = "auto", prompt_end: str = OPEN, most: int | None = None) -> list[Part]:
    reader = harmony().reader(choice, prompt_end, most)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return joined([*parts, *reader.finish()])


@pytest.mark.parametrize(("prompt_end", "text", "parts"), [*((OPEN, *each) for each in CASES), *BEGUN])
def test_replies_of_the_card(prompt_end: str, text: str, parts: list[Part]) -> None:
    rng = random.Random(text)
    assert read([text], prompt_end=prompt_end) == parts
    assert read(list(text), prompt_end=prompt_end) == parts
    for _ in range(20):
        assert read(cut(text, rng), prompt_end=prompt_end) == parts


def test_how_random_text_is_cut_changes_nothing() -> None:
    rng = random.Random(1)
    bits = [
        *harmony().markers,
        *(mark[:-1] for mark in harmony().markers),
        "analysis",
        "final",
        " to=functions.f",
        "to=",
    ]
    bits += [THOUGHT, FINAL, TO_F, NEXT, "{", "}", '"a"', "x", " ", "\n", "é", "y" * 600]
    for _ in range(300):
        text = "".join(rng.choices(bits, k=rng.randint(1, 14)))
        most, end = rng.choice([None, 1]), rng.choice([OPEN, OPEN + THOUGHT, OPEN + FINAL])
        whole = read([text], most=most, prompt_end=end)
        assert read(list(text), most=most, prompt_end=end) == whole, text
        assert read(cut(text, rng), most=most, prompt_end=end) == whole, text


def test_parts_come_as_they_are_written() -> None:
    assert read([f'{TO_F}{{"a": 1}}<|call|>'], "none") == [Content('{"a": 1}')], "without tools a call must be content"
    reader = harmony().reader("auto", OPEN)
    assert reader.feed(f"{THOUGHT}I s") == [Reasoning("I s")]
    assert reader.feed("ee<|en") == [Reasoning("ee")]
    assert reader.feed(f"d|>{NEXT}{TO_F}{{") == [CallBegin(0, "f"), CallArguments(0, "{")]
    assert reader.feed('"a": 1') == [CallArguments(0, '"a": 1')]


def test_calls_and_reasoning_are_one_format() -> None:
    for tools, reasoning in (("openai", ""), ("openai", "qwen3"), ("hermes", "openai_gptoss")):
        with pytest.raises(ConfigError, match="are one format; name it for both"):
            ReplyFormat(tools, reasoning)
    ReplyFormat("", "openai_gptoss")
    assert not harmony().history_marks, "turn markers in messages must stay text"
    assert not harmony().markers & ReplyFormat().history_marks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("harmony"), "special", sorted(harmony().markers))


GOALS = [f"<|end|>{NEXT}", "<|end|>", "{", FINAL, TO_F, "<|channel|>"]


@pytest.mark.parametrize("end", [OPEN, OPEN + THOUGHT])
@pytest.mark.parametrize("tool_parser", ["openai", ""])
def test_required_calls_are_made_once_and_fit(world: World, tool_parser: str, end: str) -> None:
    form = ReplyFormat(tool_parser, "openai_gptoss")
    guide = form.guide(TOOLS, "required", end, 3)
    assert guide is not None
    for seed in range(12):
        text = world.walk(guide, random.Random(seed), GOALS)
        reader = form.reader("required", end, 3)
        parts = [*reader.feed(text), *reader.finish()]
        assert len(calls_of(parts)) == 1, text
        assert not any(isinstance(part, Content) for part in parts), text
        must_fit(calls_of(parts), TOOLS)
    for start in (TO_F.replace(".f", ".add"), " to=functions.add<|channel|>commentary json<|message|>"):
        assert world.verdict(guide, f'{GOALS[0] if end != OPEN else ""}{start}{{"a": 1, "b": 2}}') in ("whole", "begun")


def test_strict_calls_in_free_replies_fit(world: World) -> None:
    guide = harmony().guide(TOOLS, "auto", OPEN)
    assert guide is not None
    num_calls = 0
    for seed in range(100):
        parts = read([world.walk(guide, random.Random(seed), GOALS)])
        must_fit(calls_of(parts), TOOLS)
        num_calls += len(calls_of(parts))
    assert num_calls >= 2
    for text in (f"{FINAL}Hi [x]", f"{THOUGHT}So.<|end|>{NEXT}<|channel|>commentary<|message|>I<|end|>{NEXT}{FINAL}Hi"):
        assert world.verdict(guide, text) == "whole"


@pytest.mark.parametrize("end", [OPEN, OPEN + THOUGHT, OPEN + FINAL])
def test_answers_follow_their_guide(world: World, end: str) -> None:
    for tools, choice in (([], "none"), (TOOLS, "auto")):
        guide = harmony().guide(tools, choice, end, None, ANSWER)
        assert guide is not None
        for seed in range(12):
            parts = read([world.walk(guide, random.Random(seed), GOALS)], choice, end)
            content = "".join(part.text for part in parts if isinstance(part, Content))
            if calls_of(parts):
                assert choice == "auto"
                assert not content
            else:
                assert isinstance(json.loads(content)["yes"], bool)


def test_an_answer_that_has_begun_makes_no_calls() -> None:
    with pytest.raises(RequestError, match="continue_final_message") as caught:
        harmony().guide(TOOLS, "required", OPEN + FINAL)
    assert caught.value.param == "tool_choice"
    assert harmony().guide([Tool("f", {})], "auto", OPEN + FINAL) is None
    assert harmony().mark_after("so far") == FINAL
