"""Guides for whole replies: reasoning first, then calls in the markup that the tool parser reads, or an answer.

guide_nodes.py defines the nodes of a guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.parsers.call_format import Format
from pd_cluster.parsers.format_table import UNMARKED
from pd_cluster.parsers.guide_nodes import MAX_CALLS, Node, Tool
from pd_cluster.parsers.harmony import Channels
from pd_cluster.parsers.reasoning import NONE, Start, Thinking
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide

ToolChoice = Literal["none", "auto", "required", "named"]


class CallRules(NamedTuple):
    """The calls that a reply may make. `are_some`: the model also sees tools not in `given`."""

    given: Sequence[Tool]
    choice: ToolChoice
    most_calls: int | None
    are_some: bool


def guide_of(
    form: Format | None, thinking: Thinking | None, start: Start, calls: CallRules, answer: Guide | None
) -> Guide | None:
    """Builds the guide for a whole reply; None: no constraint. Raises RequestError."""
    choice = calls.choice
    if choice in ("required", "named") and answer is not None:
        raise RequestError(
            f"tool_choice: {choice} leaves no room for an answer, which structured_outputs, guided_* or a "
            "structural_tag constrain; leave out one of the two",
            param="tool_choice",
        )
    thinking = thinking or NONE
    content = _content(form, thinking, start, calls, answer)
    if content is None:
        return None
    nodes = [*thinking.before(start, ends_early=choice == "auto" and answer is None), *thinking.around(content)]
    if answer is not None and nodes == [_of(answer)]:
        return answer
    text = msgspec.json.encode(["seq", *nodes]).decode()
    if len(text) > MAX_GUIDE_NUM_CHARS:
        field = "tools" if calls.given else "response_format"
        raise RequestError(
            f"{field}: a guide of {len(text)} characters; at most {MAX_GUIDE_NUM_CHARS} are allowed", param=field
        )
    return Guide("reply", text)


def _content(
    form: Format | None, thinking: Thinking, start: Start, calls: CallRules, answer: Guide | None
) -> Node | None:
    """Returns the node for the content after the reasoning; None: no constraint."""
    given, choice, most_calls, _ = calls
    shown = None if answer is None else thinking.answer(start, _of(answer))
    if start == "content" and isinstance(thinking, Channels):
        if choice in ("required", "named") and given:
            raise RequestError(
                f"tool_choice: {choice}: this model cannot make calls in a continued answer; leave out "
                f"continue_final_message",
                param="tool_choice",
            )
        guided = None if shown is not None else _optional(form, calls)
        return shown if guided is None else thinking.within_content(guided)
    if choice in ("required", "named") and given:
        return (form or UNMARKED).calls(given, 1 if choice == "named" else most_calls or MAX_CALLS)
    if choice == "auto" and form is not None and given and shown is not None:
        return ["any", form.calls(_lenient(given), most_calls or MAX_CALLS), shown]
    return shown if shown is not None else _optional(form, calls)


def _optional(form: Format | None, calls: CallRules) -> Node | None:
    """Returns the node for free text whose calls follow the tools; None: no constraint."""
    given, choice, most_calls, are_some = calls
    if choice != "auto" or form is None or not (are_some or any(tool.strict for tool in given)):
        return None
    return form.perhaps(_lenient(given), most_calls)


def _lenient(given: Sequence[Tool]) -> list[Tool]:
    return [tool if tool.strict else Tool(tool.name, {}) for tool in given]


def _of(answer: Guide) -> Node:
    """Returns the node of an answer's guide; a tree of nodes is used directly."""
    if answer.kind != "reply":
        return ["guide", answer.kind, answer.text]
    tree: Node = msgspec.json.decode(answer.text)
    return tree
