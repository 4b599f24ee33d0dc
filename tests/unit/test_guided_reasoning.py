"""Guides and parsers agree: a guide permits a reply exactly if the content that the parser finds in it satisfies it.

Guides forbid closing markers that the parser would remove from content. The texts include replies without an opening
marker where the parser expects reasoning.
"""

from __future__ import annotations

import random

import pytest

from pd_cluster.parsers.format_table import THINKING
from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.parsers.reply_parts import Content, Part, Reasoning
from pd_cluster.types import Guide
from tests.support.usual import slow_but
from tests.unit.test_tool_guides import World

WORDS = ["yes", "no", "so"]
ANSWER = Guide("choice", '["yes","no"]')
QUICK = {"deepseek_r1", "qwen3", "mistral", "step3", "granite"}
PARSERS = slow_but(QUICK, sorted({*THINKING} - {"openai_gptoss"}))  # tested in test_harmony.py
MARKS = sorted({mark for each in THINKING.values() for mark in each.markers if " " not in mark})


@pytest.fixture(scope="module", params=["text", "special"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param, MARKS)


def parts_of(form: ReplyFormat, text: str, prompt_end: str) -> list[Part]:
    reader = form.reader("none", prompt_end)
    return [*reader.feed(text), *reader.finish()]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_guide_permits_a_text_where_its_content_fits(world: World, parser: str) -> None:
    form, thinking = ReplyFormat("", parser), THINKING[parser]
    rng = random.Random(parser)
    marks = [*thinking.opens, *thinking.closes]
    bits = [*WORDS, *WORDS, *marks, *marks, "\n", *thinking.wraps, *thinking.also_wraps]
    num_permitted = 0
    for prompt_end in ("", f"a {thinking.opens[0]}", f"{thinking.closes[0]}\n"):
        guide = form.guide([], "none", prompt_end, answer=ANSWER)
        for text in sorted({"".join(rng.choices(bits, k=rng.randint(1, 5))) for _ in range(100)}):
            content = "".join(part.text for part in parts_of(form, text, prompt_end) if isinstance(part, Content))
            is_permitted = world.verdict(guide, text) == "whole"
            fits = content in ("yes", "no")
            assert is_permitted == fits or (fits and any(mark in text for mark in thinking.closes)), text
            num_permitted += is_permitted
    assert num_permitted > 3


@pytest.mark.parametrize("parser", ["deepseek_r1", "step3"])
def test_a_reply_that_never_closes_its_reasoning_is_reasoning_for_both(world: World, parser: str) -> None:
    form = ReplyFormat("", parser)
    assert parts_of(form, "yes", "") == [Reasoning("yes")]
    assert world.verdict(form.guide([], "none", "", answer=ANSWER), "yes") == "begun"
    assert parts_of(form, "so</think>yes", "") == [Reasoning("so"), Content("yes")]
