"""Replies in one format with the parts that clients must get, and a check that these do not depend on the text's split.

Other files have the tables for each family of formats. Knows nothing of any markup.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from pd_cluster.parsers.reply_format import ReplyFormat, Tool
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning

TOOLS = (
    Tool(
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
                "place": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "number": {"type": "integer"}},
                },
                "free": {},
            },
            "$defs": {"list": {"type": "array"}},
        },
    ),
    Tool("g", {}),
)


class Reply(NamedTuple):
    """A model's text and its meaning. Arguments are an object, or text if they are cut short or damaged."""

    text: str
    content: str = ""
    calls: tuple[tuple[str, dict[str, Any] | str], ...] = ()
    reasoning: str = ""


class Case(NamedTuple):
    """Replies in one format of calls and one of reasoning; "": no such format."""

    tools: str
    thinking: str = ""
    replies: tuple[Reply, ...] = ()
    given: tuple[Tool, ...] = TOOLS
    prompt_end: str = ""


def parts_of(case: Case, pieces: list[str]) -> list[Part]:
    """Parses the pieces; returns the parts, with adjacent parts of one kind merged."""
    reader = ReplyFormat(case.tools, case.thinking).reader("auto", case.prompt_end, None, case.given)
    found: list[Part] = []
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.finish():
        last = found[-1] if found else None
        if last is not None and type(last) is type(part) and not isinstance(part, CallBegin) and last[:-1] == part[:-1]:
            found[-1] = last._replace(text=last[-1] + part[-1])
        else:
            found.append(part)
    return found


def must_mean(parts: list[Part], reply: Reply) -> None:
    """Fails unless the parts equal the reply's meaning."""
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    texts = [
        "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == at)
        for at in range(len(names))
    ]
    wanted = [arguments for _, arguments in reply.calls]
    assert len(texts) == len(wanted), (reply.text, names, texts)
    read: list[Any] = [
        json.loads(text) if isinstance(arguments, dict) else text for text, arguments in zip(texts, wanted, strict=True)
    ]
    assert list(zip(names, read, strict=True)) == list(reply.calls), (reply.text, names, texts)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == reply.content, reply.text
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reply.reasoning, reply.text


def must_not_depend_on_cuts(case: Case, reply: Reply, num_splits: int) -> None:
    """Fails if the parts change when the text arrives in single characters, or in one of `num_splits` random splits."""
    whole, rng = parts_of(case, [reply.text]), random.Random(reply.text)
    assert parts_of(case, list(reply.text)) == whole, reply.text
    for _ in range(num_splits):
        num_cuts = rng.randint(1, rng.choice((3, 12)))
        cuts = sorted(rng.choices(range(len(reply.text) + 1), k=num_cuts))
        pieces = [reply.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply.text)], strict=True)]
        assert parts_of(case, pieces) == whole, pieces
