"""Guides of `allowed_tools` with mode auto permit no text in which the parser finds a call to another tool."""

from __future__ import annotations

import random

import pytest

from pd_cluster.parsers.format_table import CALL_ALIASES, FORMATS, THINKING
from pd_cluster.parsers.reply_format import ReplyFormat, Tool
from pd_cluster.parsers.reply_parts import CallBegin
from pd_cluster.types import Guide
from tests.unit.test_tool_guides import World

GOOD, BAD = Tool("ok", {}), Tool("bad", {})
BAD_CALLS = {
    "deepseek_v4": [
        '<｜DSML｜invoke name="bad">\n</｜DSML｜invoke>',
        '<｜DSML｜toolcalls>\n<｜DSML｜invoke name="bad">',
    ],
    "gigachat3": ['<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "bad", "arguments": {}}'],
    "kimi_k3": ['<|open|>tools<|sep|><|open|>call tool="bad" index="1"<|sep|><|close|>call<|sep|>'],
    "step3": ['<｜tool_call_begin｜><steptml:invoke name="bad"></steptml:invoke>'],
    "granite": ['<tool_call>[{"name": "bad", "arguments": {}}]'],
    "granite4": ['<tool_call>{"name": "bad", "arguments": {}}'],
    "internlm": ['<|action_start|><|plugin|>{"name": "bad", "arguments": {}}'],
    "llama3_json": ['\t<|python_tag|>{"name": "bad", "parameters": {}}'],
    "qwen3_coder": ["<function=bad>\n</function>"],
}
REASONING = {"granite": "granite", "hunyuan_a13b": "hunyuan_a13b", "kimi_k2": "kimi_k2", "openai": "openai_gptoss"}
ENDS = ("", "<think>\n", "<|channel|>final<|message|>")
ALONE = sorted(set(FORMATS) - {"openai", *CALL_ALIASES})
PAIRS = [*((name, "") for name in ALONE), *REASONING.items(), ("hermes", "qwen3"), ("glm45", "ernie45")]


@pytest.fixture(scope="module", params=["text", "special"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    found = [*(each.markers for each in FORMATS.values()), *(each.markers for each in THINKING.values())]
    markers = sorted({mark for each in found for mark in each if " " not in mark and mark != "functools"})
    return World(tmp_path_factory.mktemp(request.param), request.param, markers)


def guide_of(form: ReplyFormat, prompt_end: str = "") -> Guide:
    guide = form.guide([GOOD], "auto", prompt_end, None, None, True)
    assert guide is not None
    return guide


def names_in(form: ReplyFormat, text: str, prompt_end: str = "") -> set[str]:
    reader = form.reader("auto", prompt_end, None, [GOOD])
    return {part.name for part in (*reader.feed(text), *reader.finish()) if isinstance(part, CallBegin)}


def goals_of(form: ReplyFormat) -> list[str]:
    calls = FORMATS.get(form.tool_parser)
    ends = (getattr(calls, "close", ""), *getattr(calls, "quote", ()))
    return [*sorted(form.markers), *filter(None, ends), "a"]


def fragments_of(world: World, form: ReplyFormat, rng: random.Random) -> list[str]:
    """Returns whole calls of either tool, pieces of them, markers, and plain text."""
    calls = list(BAD_CALLS.get(form.tool_parser, []))
    for tool in (GOOD, BAD, BAD):
        guide = form.guide([tool], "required", "", 2)
        assert guide is not None
        calls.append(world.walk(guide, rng, goals_of(form)))
    cuts = [call[rng.randrange(len(call)) :] for call in calls for _ in range(2)]
    marks = sorted(form.markers)
    return [*calls, *calls, *cuts, *marks, *marks, "text", "\n", "\t ", "final", " to=functions.bad"]


@pytest.mark.parametrize(("parser", "reasoning"), PAIRS)
def test_no_call_outside_the_set(world: World, parser: str, reasoning: str) -> None:
    form = ReplyFormat(parser, reasoning)
    matchers = [(end, world.compiler.compile(guide_of(form, end))) for end in ENDS]
    num_calls = 0
    for seed in range(15):
        rng = random.Random(seed)
        if seed % 5 == 0:
            fragments = fragments_of(world, form, rng)
        prompt_end, fresh = matchers[seed % len(ENDS)]
        matcher, taken = fresh.copy(), list[int]()
        for _ in range(12):
            for token_id in world.ids(rng.choice(fragments)):
                if token_id not in world.allowed(matcher):
                    break
                matcher.take([token_id])
                taken.append(token_id)
        text = str(world.tokenizer.decode(taken, skip_special_tokens=False))
        names = names_in(form, text, prompt_end)
        assert names <= {"ok"}, text
        num_calls += len(names)
    assert num_calls


@pytest.mark.parametrize("parser", ALONE)
def test_text_and_several_calls_of_the_set_are_free(world: World, parser: str) -> None:
    form = ReplyFormat(parser)
    required = form.guide([GOOD], "required", "", 1)
    assert required is not None
    call = world.walk(required, random.Random(1), goals_of(form))
    assert world.verdict(guide_of(form), call) == "whole"
    if parser not in ("llama3_json", "pythonic", "llama4_pythonic", "openai", "xlam"):
        assert world.verdict(guide_of(form), f"First. {call}\nThen {call} and {call}\nDone.") == "whole"
