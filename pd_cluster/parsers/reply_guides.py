"""Guides for whole replies: reasoning first, then calls in the markup that the tool parser reads, or an answer.

nodes.py says what a guide consists of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.parsers.formats import Format
from pd_cluster.parsers.nodes import BLANK, MAX_CALLS, Node, Tool
from pd_cluster.parsers.reasoning import Start, Thinking
from pd_cluster.parsers.table import UNMARKED
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide

ToolChoice = Literal["none", "auto", "required", "named"]


def guide_of(
    form: Format | None,
    thinking: Thinking | None,
    start: Start,
    given: Sequence[Tool],
    choice: ToolChoice,
    most_calls: int | None,
    answer: Guide | None,
) -> Guide | None:
    """Builds the guide for a whole reply; None: anything goes. Raises RequestError."""
    if choice in ("required", "named") and answer is not None:
        raise RequestError(
            f"tool_choice: {choice} leaves no room for an answer, which response_format or guided_* constrain",
            param="tool_choice",
        )
    content = _content(form, given, choice, most_calls, answer)
    if content is None or (start == "content" and answer is not None and content == _of(answer)):
        return answer
    text = msgspec.json.encode(["seq", *_thinking(thinking, start), *_wrapped(thinking, start, content)]).decode()
    if len(text) > MAX_GUIDE_NUM_CHARS:
        field = "tools" if given else "response_format"
        raise RequestError(
            f"{field}: a guide of {len(text)} characters; at most {MAX_GUIDE_NUM_CHARS} are allowed", param=field
        )
    return Guide("reply", text)


def _content(
    form: Format | None, given: Sequence[Tool], choice: ToolChoice, most_calls: int | None, answer: Guide | None
) -> Node | None:
    """Returns the node for the content after the reasoning; None: anything goes."""
    if choice in ("required", "named") and given:
        return (form or UNMARKED).calls(given, 1 if choice == "named" else most_calls or MAX_CALLS)
    if choice == "auto" and form is not None and given:
        lenient = [tool if tool.strict else Tool(tool.name, {}) for tool in given]
        if answer is not None:
            return ["any", form.calls(lenient, most_calls or MAX_CALLS), _of(answer)]
        return form.perhaps(lenient, most_calls) if any(tool.strict for tool in given) else None
    return None if answer is None else _of(answer)


def _of(answer: Guide) -> Node:
    return ["guide", answer.kind, answer.text]


def _thinking(thinking: Thinking | None, start: Start) -> list[Node]:
    if thinking is None or start == "content":
        return []
    opening: Node = ["marker", thinking.opens[0]]
    thought: list[Node] = [["until", thinking.closes[0]], BLANK]
    if start == "perhaps":
        return [["repeat", 0, 1, ["seq", opening, *thought]]]
    return [["repeat", 0, 1, opening], *thought]


def _wrapped(thinking: Thinking | None, start: Start, content: Node) -> list[Node]:
    """Allows the texts that a model writes around its content."""
    if thinking is None or thinking.wraps is None or start == "content":
        return [content]
    before, after = thinking.wraps
    return [["repeat", 0, 1, ["seq", ["marker", before], BLANK]], content, ["repeat", 0, 1, ["marker", after]]]
