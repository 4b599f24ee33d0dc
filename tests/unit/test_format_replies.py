"""Parses twenty replies in each format, and special cases of some formats, whole and in any pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import groupby

import pytest

from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from tests.support.format_replies import REPLIES, TOOLS, Call, Reply, Writer
from tests.support.format_replies import WRITERS as TAG_WRITERS
from tests.support.json_writers import JSON_WRITERS
from tests.unit.test_parsers import joined

WRITERS = TAG_WRITERS | JSON_WRITERS
Found = list[tuple[str, str, str]]  # (kind, name, text)


def written(reply: Reply, writer: Writer) -> str:
    """Writes a reply as the format's model does, cut after `reply.cut` if it is set."""
    before, after = writer.answer
    thought = f"{reply.thought.join(writer.thought)}\n\n" if reply.thought else ""
    found = [thought]
    for is_call, run in groupby(reply.parts, lambda part: isinstance(part, Call)):
        parts = list(run)
        found.append(writer.calls(parts) if is_call else f"{before}{''.join(parts)}{after}")
    text = "".join(found)
    return text[: text.rindex(reply.cut) + len(reply.cut)] if reply.cut else text


def prompt_end_of(reply: Reply, writer: Writer) -> str:
    """Returns the prompt's end: for a model that begins with reasoning, closed if the reply has none."""
    return writer.prompt_end if reply.thought else writer.thought[1]


def expected(reply: Reply) -> Found:
    found: Found = [("reasoning", "", reply.thought)] if reply.thought else []
    for part in reply.parts:
        found.append(
            ("content", "", part) if isinstance(part, str) else ("call", part.name, json.dumps(part.arguments))
        )
    return [*found[:-1], ("cut", found[-1][1], reply.torn)] if reply.cut else found


def read(form: ReplyFormat, pieces: Sequence[str], prompt_end: str) -> tuple[list[Part], bool]:
    reader = form.reader("auto", prompt_end, None, TOOLS)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return joined([*parts, *reader.finish()]), reader.is_cut


def found_in(parts: list[Part], is_cut: bool) -> Found:
    found: Found = []
    for part in parts:
        match part:
            case Reasoning(text):
                found.append(("reasoning", "", text))
            case Content(text):
                found.append(("content", "", text))
            case CallBegin(_, name):
                found.append(("call", name, ""))
            case CallArguments(_, text):
                kind, name, before = found[-1]
                found[-1] = (kind, name, before + text)
    whole = [(kind, name, text if kind != "call" else _same(text, is_cut)) for kind, name, text in found]
    return [*whole[:-1], ("cut", *whole[-1][1:])] if is_cut else whole


def _same(text: str, is_cut: bool) -> str:
    """Normalizes arguments; returns cut ones unchanged."""
    try:
        return json.dumps(json.loads(text))
    except ValueError:
        assert is_cut, text
        return text


@pytest.mark.parametrize("parser", WRITERS)
def test_each_reply_is_found(parser: str) -> None:
    writer = WRITERS[parser]
    form = ReplyFormat(parser, writer.reasoning)
    for reply in REPLIES:
        text = written(reply, writer)
        prompt_end = prompt_end_of(reply, writer)
        assert found_in(*read(form, [text], prompt_end)) == expected(reply), text


def check_splits(parser: str, num_splits: int) -> None:
    """Parses each reply in pieces, with `num_splits` random splits over all replies."""
    rng = random.Random(parser)
    writer = WRITERS[parser]
    form = ReplyFormat(parser, writer.reasoning)
    for reply in REPLIES:
        text, prompt_end = written(reply, writer), prompt_end_of(reply, writer)
        whole = read(form, [text], prompt_end)
        assert read(form, list(text), prompt_end) == whole, text
        for _ in range(num_splits // len(REPLIES)):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([1, 2, 5, len(text) // 3])))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert read(form, pieces, prompt_end) == whole, pieces


@pytest.mark.parametrize("parser", WRITERS)
def test_splits_change_nothing(parser: str) -> None:
    check_splits(parser, 40)


@pytest.mark.slow
@pytest.mark.parametrize("parser", WRITERS)
def test_thousands_of_splits_change_nothing(parser: str) -> None:
    check_splits(parser, 2000)
