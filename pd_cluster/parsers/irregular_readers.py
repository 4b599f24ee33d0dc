"""Readers of calls without a declarative description: Llama 3, Mistral, and bare arrays.

Text that only looks like a call is passed on as content. If a call's arguments become invalid JSON, the call keeps
the text up to a closing marker, the next call or the end, so that clients see the model's output. Knows nothing of
reasoning or of which tools exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pd_cluster.parsers.collected_reply import CollectedReply, Outcome, read_call
from pd_cluster.parsers.json_scan import scan_value, take_sign
from pd_cluster.parsers.text_stream import BLANKS, Steps, TextStream

Reader = Callable[[TextStream, CollectedReply], Steps[None]]

PYTHON_TAG = "<|python_tag|>"
NAME_IN_TEXT = '{"name":'
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_MISTRAL = re.compile("|".join(map(re.escape, (TOOL_CALLS, CALL_ID, ARGS))))
_NAME = re.compile(r"[\w.-]*")
_BETWEEN = re.compile(f"[{BLANKS};]*")
_BETWEEN_OBJECTS = re.compile(rf"[{BLANKS};,}}]*")
_TOO_MUCH = re.compile(rf"[{BLANKS};,}}\]]*")


def read_content(stream: TextStream, out: CollectedReply) -> Steps[None]:
    """Reads a reply without calls."""
    yield from stream.until((), out.content)


def read_llama3(stream: TextStream, out: CollectedReply) -> Steps[None]:
    """Reads one or more `{"name": …, "parameters": …}`, separated by `;` or blanks, and content around them.

    After other text, a call must begin with exactly `{"name":` or with `<|python_tag|>`.
    """
    stream.keep()
    yield from stream.blanks()
    yield from _read_llama3_calls(stream, out, within_text=False)
    while (yield from stream.until((PYTHON_TAG, NAME_IN_TEXT), out.content)):
        stream.keep()
        yield from _read_llama3_calls(stream, out, within_text=True)


def _read_llama3_calls(stream: TextStream, out: CollectedReply, within_text: bool) -> Steps[None]:
    while (yield from _read_llama3_call(stream, out)):
        stream.keep()
        yield from stream.run(_BETWEEN)
        if within_text and not (yield from stream.begins(PYTHON_TAG)) and not (yield from stream.begins(NAME_IN_TEXT)):
            break
    left = stream.kept()
    is_over = not (yield from stream.peek()) and not left.strip(BLANKS + ";")
    if left and not (is_over and out.num_seen):
        out.content(left)


def _read_llama3_call(stream: TextStream, out: CollectedReply) -> Steps[bool]:
    if (yield from stream.begins(PYTHON_TAG)):
        stream.take(len(PYTHON_TAG))
    outcome = yield from read_call(stream, out, is_unmarked=True)
    if outcome == "torn":
        yield from read_torn(stream, out, ())
    return outcome == "whole"


def read_mistral(stream: TextStream, out: CollectedReply) -> Steps[None]:
    """Reads `[TOOL_CALLS]` and calls as objects or, from newer models, one call's name and arguments.

    The markers are tokens, so they are dropped where no call follows.
    """
    while (yield from stream.until((TOOL_CALLS,), out.content)):
        stream.keep()
        stream.take(len(TOOL_CALLS))
        yield from stream.blanks()
        char = yield from stream.peek()
        if char and char in "[{":
            if not (yield from read_objects(stream, out, (TOOL_CALLS,))):
                stream.take(len(TOOL_CALLS))
                is_next = yield from stream.begins(ARGS)
                stream.take(len(ARGS) if is_next else 0)
        else:
            yield from _read_named(stream, out)


def read_array(stream: TextStream, out: CollectedReply) -> Steps[None]:
    """Reads `[{"name": …, "parameters": …}, …]`, which guides require of models that have no markup of their own."""
    stream.keep()
    yield from read_objects(stream, out, (), is_marked=False)
    yield from stream.until((), out.content)


def read_objects(
    stream: TextStream,
    out: CollectedReply,
    ends: Sequence[str],
    is_marked: bool = True,
    read_one: Callable[[TextStream, CollectedReply], Steps[Outcome]] = read_call,
) -> Steps[bool]:
    """Reads calls as objects: one, several, or an array. The stream must keep its text.

    Returns whether there was a call or, if `is_marked`, an empty array; otherwise puts the text back. A torn call
    extends to one of `ends`.
    """
    num_seen = out.num_seen
    is_array = yield from take_sign(stream, "[")
    if is_array and is_marked and (yield from take_sign(stream, "]")):
        stream.kept()
        return True
    while True:
        outcome = yield from read_one(stream, out)
        if outcome == "torn":
            yield from read_torn(stream, out, ends)
            return True
        if outcome == "none":
            break
        stream.keep()
        yield from stream.run(_BETWEEN_OBJECTS)
        char = yield from stream.peek()
        if is_array and char == "]":
            stream.take(1)
            stream.kept()
            return True
        if char != "{":
            break
    stream.put_back()
    return out.num_seen > num_seen


def read_torn(stream: TextStream, out: CollectedReply, ends: Sequence[str]) -> Steps[str]:
    """Reads the rest of a torn call as its arguments. Returns the end marker that follows."""
    marker = yield from stream.until(ends, out.arguments)
    if not marker:
        out.cut()
    return marker


def close_calls(stream: TextStream, out: CollectedReply, end: str, starts: Sequence[str]) -> Steps[str]:
    """Takes the marker after calls. Text before it is content, except unmatched closing brackets.

    Returns which of `starts` comes before the marker; "" for none.
    """
    if (yield from stream.take_after_run(_TOO_MUCH, end)):
        return ""
    marker = yield from stream.until((end, *starts), out.content)
    if marker != end:
        return marker
    stream.take(len(end))
    return ""


def _read_named(stream: TextStream, out: CollectedReply) -> Steps[None]:
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
        out.content(_MISTRAL.sub("", stream.kept()))
        return
    stream.kept()
    out.begin("".join(name))
    if not (yield from scan_value(stream, out.arguments)):
        yield from read_torn(stream, out, (TOOL_CALLS,))
