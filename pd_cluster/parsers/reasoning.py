"""The thinking that comes before a reply's content: `<think>…</think>`.

Blanks at both ends of the reasoning, and between it and the content, belong to the markup and are not shown. What comes
without an end stays reasoning; a later `<think>` is content. Knows nothing of tools.
"""

from __future__ import annotations

import re
from typing import Literal

from pd_cluster.parsers.stream import BLANKS, Emit, Steps, Stream

OPEN, CLOSE = "<think>", "</think>"
PARSERS = ("deepseek_r1", "qwen3")

# What a model's first text is: reasoning, perhaps after an `<think>` of its own; only after that; never.
Start = Literal["reasoning", "perhaps", "content"]

_LAST_MARK = re.compile(rf"({OPEN}|{CLOSE})[{BLANKS}]*\Z")


def start_of(parser: str, prompt_end: str) -> Start:
    """Where the prompt leaves it open, deepseek_r1 takes it that the model thinks, qwen3 that it may."""
    if not parser:
        return "content"
    mark = _LAST_MARK.search(prompt_end)
    if mark is not None:
        return "reasoning" if mark[1] == OPEN else "content"
    return "reasoning" if parser == "deepseek_r1" else "perhaps"


def read_reasoning(stream: Stream, start: Start, emit: Emit) -> Steps[None]:
    """Takes all that comes before the content."""
    if start == "content":
        return
    stream.keep()
    yield from stream.blanks()
    if (yield from stream.begins(OPEN)):
        stream.take(len(OPEN))
        yield from stream.blanks()
    elif start == "perhaps":
        stream.put_back()
        return
    stream.kept()
    if (yield from stream.until((CLOSE,), _Trimmed(emit).add)):
        stream.take(len(CLOSE))
        yield from stream.blanks()


class _Trimmed:
    """Text without the blanks at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._blanks: list[str] = []

    def add(self, text: str) -> None:
        solid = text.rstrip(BLANKS)
        if solid:
            self._emit("".join([*self._blanks, solid]))
            self._blanks = []
        self._blanks.append(text[len(solid) :])
