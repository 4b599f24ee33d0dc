"""Readers of calls whose markup no description covers: Llama 3, Mistral, and arrays without any markup.

Text that looks like a call and is none is content, as it was written. If a call's arguments stop being valid JSON, the
call keeps the rest, up to the closing marker or the end, so clients see what the model wrote. Knows nothing of
reasoning, nor of which tools exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pd_cluster.parsers.calls import Gathered, read_call
from pd_cluster.parsers.json_scan import scan_value, take_sign
from pd_cluster.parsers.stream import BLANK_RUN, BLANKS, Steps, TextStream

Reader = Callable[[TextStream, Gathered], Steps[None]]

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r"[\w.-]*")
_BETWEEN = re.compile(f"[{BLANKS};]*")


def read_content(stream: TextStream, out: Gathered) -> Steps[None]:
    """Reads a reply without any calls."""
    yield from stream.until((), out.content)


def read_llama3(stream: TextStream, out: Gathered) -> Steps[None]:
    """Reads `{"name": …, "parameters": …}` as the whole reply, or several, separated by `;` or blanks; otherwise
    content.
    """
    outcome = "whole"
    while outcome == "whole":
        stream.keep()
        yield from stream.run(_BETWEEN if out.num_seen else BLANK_RUN)
        if (yield from stream.begins(PYTHON_TAG)):
            stream.take(len(PYTHON_TAG))
        outcome = yield from read_call(stream, out, needs_arguments=True)
    if outcome == "none":
        left = stream.kept()
        is_over = not (yield from stream.peek()) and not left.strip(BLANKS + ";")
        if not is_over or not out.num_seen:
            out.content(left)
    yield from stream.until((), out.arguments if outcome == "torn" else out.content)


def read_mistral(stream: TextStream, out: Gathered) -> Steps[None]:
    """Reads `[TOOL_CALLS]` and an array of calls, or, from newer models, one call's name and arguments."""
    while (yield from stream.until((TOOL_CALLS,), out.content)):
        stream.keep()
        stream.take(len(TOOL_CALLS))
        yield from stream.blanks()
        if (yield from stream.peek()) == "[":
            yield from read_array_of(stream, out, (TOOL_CALLS,))
        else:
            yield from _read_named(stream, out)


def read_array(stream: TextStream, out: Gathered) -> Steps[None]:
    """Reads `[{"name": …, "parameters": …}, …]`, the form that guides impose on models without markup of their own."""
    stream.keep()
    yield from read_array_of(stream, out, ())
    yield from stream.until((), out.content)


def read_array_of(stream: TextStream, out: Gathered, ends: Sequence[str]) -> Steps[None]:
    """Reads an array. The text that the stream keeps is content if no call follows. A torn call extends to one of
    `ends`.
    """
    is_open = yield from take_sign(stream, "[")
    while is_open:
        match (yield from read_call(stream, out)):
            case "none":
                break
            case "torn":
                yield from stream.until(ends, out.arguments)
                return
        stream.keep()
        is_open = yield from take_sign(stream, ",")
    if out.num_seen and not is_open and (yield from take_sign(stream, "]")):
        stream.kept()
    else:
        out.content(stream.kept())


def _read_named(stream: TextStream, out: Gathered) -> Steps[None]:
    """Reads `name{…}`, `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`."""
    name: list[str] = []
    yield from stream.run(_NAME, name.append)
    yield from stream.blanks()
    if (yield from stream.begins(CALL_ID)):
        stream.take(len(CALL_ID))
        yield from stream.run(_NAME)
        yield from stream.blanks()
    if (yield from stream.begins(ARGS)):
        stream.take(len(ARGS))
        yield from stream.blanks()
    if not name or (yield from stream.peek()) != "{":
        out.content(stream.kept())
        return
    stream.kept()
    out.begin("".join(name))
    if not (yield from scan_value(stream, out.arguments)):
        yield from stream.until((TOOL_CALLS,), out.arguments)
