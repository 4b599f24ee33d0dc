"""The thinking that comes before a reply's content: `<think>…</think>`.

Blanks at both ends of the reasoning, and between it and the content, are markup and are not shown. Reasoning that never
ends stays reasoning; a later `<think>` is content. Knows nothing of tools.
"""

from __future__ import annotations

import re
from typing import Literal

from pd_cluster.parsers.stream import BLANKS, Emit, Steps, TextStream

OPEN, CLOSE = "<think>", "</think>"
PARSERS = ("deepseek_r1", "qwen3")

# The model's first text is reasoning (maybe after its own `<think>`), is reasoning only after `<think>`, or is content.
Start = Literal["reasoning", "perhaps", "content"]

_LAST_MARK = re.compile(rf"({OPEN}|{CLOSE})[{BLANKS}]*\Z")


def start_of(parser: str, prompt_end: str) -> Start:
    """Reads the start from the prompt's last mark. Without one, deepseek_r1 implies reasoning, and qwen3 leaves it
    open.
    """
    if not parser:
        return "content"
    mark = _LAST_MARK.search(prompt_end)
    if mark is not None:
        return "reasoning" if mark[1] == OPEN else "content"
    return "reasoning" if parser == "deepseek_r1" else "perhaps"


def read_reasoning(stream: TextStream, start: Start, emit: Emit) -> Steps[None]:
    """Takes everything before the content."""
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
    """Emits text without the blanks at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._blanks: list[str] = []

    def add(self, text: str) -> None:
        solid = text.rstrip(BLANKS)
        if solid:
            self._emit("".join([*self._blanks, solid]))
            self._blanks = []
        self._blanks.append(text[len(solid) :])
