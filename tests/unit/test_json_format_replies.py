"""Replies in JSON, Python or Gemma's braces are parsed as in their model cards, however the text is split."""

from __future__ import annotations

import random

import pytest

from pd_cluster.parsers.reply_format import ReplyFormat
from tests.support.format_replies import Call
from tests.support.json_cases import CASES
from tests.support.json_writers import JSON_WRITERS
from tests.support.reply_cases import Case, Reply, must_mean, must_not_depend_on_cuts, parts_of

BITS = [
    "f",
    "g",
    "\n",
    " ",
    "<",
    "co>",
    "call:f{",
    "city:",
    "days:3",
    "\\",
    "f(city='",
    "thought\n",
    "07",
    "é",
    "```json",
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tools}-{case.thinking}")
def test_a_reply_means_what_its_card_says(case: Case) -> None:
    for reply in case.replies:
        must_mean(parts_of(case, [reply.text]), reply)
        must_not_depend_on_cuts(case, reply, 5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tools}-{case.thinking}")
def test_no_split_changes_a_reply(case: Case) -> None:
    for reply in case.replies:
        must_not_depend_on_cuts(case, reply, 200)


@pytest.mark.parametrize("parser", JSON_WRITERS)
def test_how_random_text_is_cut_changes_nothing(parser: str) -> None:
    rng, writer = random.Random(parser), JSON_WRITERS[parser]
    case = Case(parser, writer.reasoning)
    texts = [reply.text for each in CASES if each.tools == parser for reply in each.replies]
    texts.append(writer.calls([Call("f", {"city": "a 'b'", "days": 3}), Call("g", {})]))
    marks = sorted(ReplyFormat(parser, writer.reasoning).markers)
    for _ in range(30):
        pieces = [text[rng.randrange(len(text)) :] for text in rng.choices(texts, k=4) if text]
        pieces += [text[: rng.randrange(len(text))] for text in rng.choices(texts, k=4) if text]
        bits = [*pieces, *pieces, *marks, *(mark[:-1] for mark in marks), *BITS, *"{}[](),:='\""]
        text = "".join(rng.choices(bits, k=rng.randint(1, 14)))
        must_not_depend_on_cuts(case, Reply(text), 3)
