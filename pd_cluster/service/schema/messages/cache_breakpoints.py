"""Finds the places in a request of Anthropic's format up to which the client wants its prompt cached (`cache_control`).

Knows nothing of templates or tokens: `extended` returns a request whose prompt first differs at such a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.messages.messages_protocol import MessagesPrompt, MessageTool

Json = dict[str, Any]
Part = Literal["tools", "system", "messages"]
TTLS = ("5m", "1h")  # the default comes first
ADDED = "\ue000"  # a private-use character: ordinary texts do not continue with it


class Breakpoint(NamedTuple):
    """The end of a tool, of a block of the system prompt, or of a block of a message. `ttl`: how long to cache."""

    part: Part
    at: int  # the tool, the system block, or the message
    block: int = 0  # the block of a message; -1: the last
    ttl: str = TTLS[0]


def breakpoints_of(request: MessagesPrompt) -> list[Breakpoint]:
    """Returns a request's breakpoints in the order that Anthropic defines. Raises RequestError for an unknown ttl."""
    found = [*_breakpoints(request)]
    for ttl in {each.ttl for each in found} - set(TTLS):
        raise RequestError(f"cache_control.ttl: {ttl!r}: expected {' or '.join(TTLS)}", param="cache_control")
    return found


def _breakpoints(request: MessagesPrompt) -> Iterator[Breakpoint]:
    for at, tool in enumerate(request.tools or ()):
        yield from _at("tools", at, 0, tool.cache_control)
    for at, block in enumerate(request.system if isinstance(request.system, list) else ()):
        yield from _at("system", at, 0, block.get("cache_control"))
    for at, turn in enumerate(request.messages):
        for index, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            yield from _at("messages", at, index, block.get("cache_control"))
            content = block.get("content")  # of a tool's result
            for part in content if isinstance(content, list) else ():
                yield from _at("messages", at, index, part.get("cache_control") if isinstance(part, dict) else None)
    yield from _at("messages", len(request.messages) - 1, -1, request.cache_control)


def _at(part: Part, at: int, block: int, control: Any) -> Iterator[Breakpoint]:
    if isinstance(control, dict) and control:
        yield Breakpoint(part, at, block, str(control.get("ttl", TTLS[0])))


def longest(breakpoints: Iterable[Breakpoint]) -> str | None:
    return max((each.ttl for each in breakpoints), key=TTLS.index, default=None)


def extended(request: MessagesPrompt, place: Breakpoint) -> MessagesPrompt:
    """Returns the request with something added at a breakpoint: up to there, both prompts are the same.

    A call is extended within its arguments, because nothing may follow a call in its turn.
    """
    if place.part == "tools":
        tools = (request.tools or [])[: place.at + 1]
        is_last = len(tools) == len(request.tools or [])
        more = [MessageTool(name="_", input_schema={})] if is_last else []
        return request.model_copy(update={"tools": [*tools, *more]})
    if place.part == "system":
        assert isinstance(request.system, list)
        return request.model_copy(update={"system": _with_more(request.system, place.at)})
    turn = request.messages[place.at]
    blocks = turn.content if isinstance(turn.content, list) else [{"type": "text", "text": turn.content}]
    content = _with_more(blocks, place.block % max(1, len(blocks)))
    messages = [*request.messages]
    messages[place.at] = turn.model_copy(update={"content": content})
    return request.model_copy(update={"messages": messages})


def _with_more(blocks: list[Json], at: int) -> list[Json]:
    """Returns the blocks with more text in the one at this place."""
    block, text = blocks[at], {"type": "text", "text": ADDED}
    more: list[Json] = []
    match block.get("type"):
        case "text":
            block = {**block, "text": f"{block.get('text', '')}{ADDED}"}
        case "tool_use":
            block = {**block, "input": {**block.get("input", {}), ADDED: ADDED}}
        case "tool_result":
            content = block.get("content") or ""
            block = {**block, "content": [*content, text] if isinstance(content, list) else content + ADDED}
        case _:
            more = [text]
    return [*blocks[:at], block, *more, *blocks[at + 1 :]]
