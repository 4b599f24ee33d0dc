"""Collects the parts of one reply, and reads the JSON object that most formats use for a call.

Knows nothing of the markup around calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from pd_cluster.parsers.content_filters import Uncited, Unpaired, Unwrapped
from pd_cluster.parsers.json_scan import StringDecoder, begins_object, read_string, scan_string, scan_value, take_sign
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.parsers.text_stream import BLANKS, Emit, Steps, TextStream, ignore

NO_SCHEMAS: Mapping[str, Any] = MappingProxyType({})
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "type", "index", "tool_call_id")

# none: the text is not a call. whole: the arguments are complete. torn: arguments began, but became invalid JSON.
Outcome = Literal["none", "whole", "torn"]


class CollectedReply:
    """The parts in order. A stretch of only blanks before, between or after calls is markup, not content.

    Calls beyond `most_calls` are dropped.
    """

    def __init__(self, most_calls: int | None = None, schemas: Mapping[str, Mapping[str, Any]] = NO_SCHEMAS) -> None:
        """`schemas`: tool -> the JSON schema of its arguments; some markup needs it to tell strings from numbers."""
        self._parts: list[Part] = []
        self._schemas = schemas
        self._most_calls = most_calls
        self._num_seen = 0
        self.is_cut = False  # the text ended within the latest call
        self.in_call = False  # the latest call's arguments may continue after content
        self.is_damaged = False  # an end marker was missing
        self._unwrapped: list[Unwrapped] = []  # the outermost first
        self._filters: list[Unpaired | Uncited] = []  # content passes through these in order, then through `_unwrapped`
        self._thought: Emit | None = None  # receives the text before the first call, if it is reasoning
        self._blanks: list[str] = []  # leading blanks of the current stretch of content
        self._has_text = False  # whether that stretch has anything but blanks

    def schema_of(self, name: str) -> Mapping[str, Any]:
        """Returns the schema of a tool's arguments; empty for a tool that is not in the request."""
        return self._schemas.get(name, NO_SCHEMAS)

    def has_tool(self, name: str) -> bool:
        """Returns whether the request has a tool of this name; True if its tools are unknown."""
        return bool(name) and (not self._schemas or name in self._schemas)

    @property
    def num_seen(self) -> int:
        return self._num_seen

    @property
    def num_calls(self) -> int:
        return self._num_seen if self._most_calls is None else min(self._num_seen, self._most_calls)

    def reasoning(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def think(self, thought: Emit) -> None:
        """Sends the text before the first call to `thought`: it is reasoning, and the call ends it."""
        self._thought = thought

    def unwrap(self, wraps: tuple[str, ...]) -> None:
        """Removes these texts around content from now on."""
        self._unwrapped.insert(0, Unwrapped(wraps, self._unwrapped[0].add if self._unwrapped else self._content))

    def leave_out_citations(self) -> None:
        """Removes citation marks from content from now on."""
        self._filters.insert(0, Uncited(self._filtered()))

    def leave_out_closes(self, opens: Sequence[str], closes: Sequence[str]) -> None:
        """Removes these closing marks from content from now on, unless an opening mark precedes them."""
        if closes:
            self._filters.insert(0, Unpaired(opens, closes, self._filtered()))

    def _filtered(self) -> Emit:
        return self._filters[0].add if self._filters else self._unmarked

    def content(self, text: str) -> None:
        if self._thought is not None and not self._num_seen:
            self._thought(text)
        else:
            self._filtered()(text)

    def _unmarked(self, text: str) -> None:
        if self._unwrapped:
            self._unwrapped[0].add(text)
        else:
            self._content(text)

    def _content(self, text: str) -> None:
        if not self._has_text:
            self._blanks.append(text)
            if not text.strip(BLANKS):
                return
            text = "".join(self._blanks)
        self._blanks, self._has_text = [], True
        self._parts.append(Content(text))

    def begin(self, name: str) -> None:
        self._flush()
        self._blanks, self._has_text = [], False
        self._num_seen += 1
        if self._num_seen == self.num_calls:
            self._parts.append(CallBegin(self._num_seen - 1, name))

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the latest call."""
        if self._num_seen == self.num_calls:
            self._parts.append(CallArguments(self._num_seen - 1, text))

    def cut(self) -> None:
        """Records that the text ended within the latest call."""
        self.is_cut = True

    def end(self) -> None:
        """Ends the reply. A reply of only blanks is content."""
        self._flush()
        if not self._num_seen and (text := "".join(self._blanks)):
            self._parts.append(Content(text))

    def _flush(self) -> None:
        for each in (*self._filters, *self._unwrapped):
            each.flush()

    @property
    def num_held(self) -> int:
        """The number of held-back characters, which may be content or markup around content."""
        num_blanks = 0 if self._has_text else sum(map(len, self._blanks))
        return num_blanks + sum(each.num_held for each in (*self._filters, *self._unwrapped))

    def take(self) -> list[Part]:
        """Returns the parts collected since the last call of this method; adjacent parts of one kind are joined."""
        taken, self._parts = self._parts, []
        joined: list[Part] = []
        for _, run in groupby(taken, lambda part: (type(part), part[:-1])):
            joined.append(_joined(list(run)))
        return joined


def _joined(run: list[Part]) -> Part:
    match run[0]:
        case CallBegin() as begin:
            return begin
        case CallArguments(index, _):
            return CallArguments(index, "".join(part[-1] for part in run))
        case first:
            return type(first)("".join(part[-1] for part in run))


class _Call:
    """A call whose object is still being read; it begins once its name and its first arguments are known."""

    def __init__(self, stream: TextStream, out: CollectedReply, is_unmarked: bool) -> None:
        self._stream = stream
        self._out = out
        self.is_unmarked = is_unmarked
        self._early: list[str] = []  # arguments that came before the name
        self._has_begun = False
        self._is_whole = False
        self.name = ""
        self.has_arguments = False
        self.has_others = False  # the object has members that calls do not have

    @property
    def outcome(self) -> Outcome:
        return "none" if not self._has_begun else "whole" if self._is_whole else "torn"

    def set_name(self, name: str) -> None:
        self.name = name
        if self.has_arguments:
            self._begin()
            self.arguments("".join(self._early))

    def begin_arguments(self) -> None:
        self.has_arguments = True
        if self.name:
            self._begin()

    def arguments(self, text: str) -> None:
        if self._has_begun:
            self._out.arguments(text)
        else:
            self._early.append(text)

    def end_arguments(self) -> None:
        self._is_whole = True

    def _begin(self) -> None:
        self._stream.kept()
        self._has_begun = True
        self._out.begin(self.name)


def read_call(stream: TextStream, out: CollectedReply, is_unmarked: bool = False, name: str = "name") -> Steps[Outcome]:
    """Reads `{"name": "…", "arguments": {…}}`, with members in any order; skips unknown members.

    Arguments may be called parameters, may be a string that holds an object, and may be missing if the object has only
    a name, an id and a type. `is_unmarked`: no marker precedes the call, so the object is a call only if its arguments
    begin like an object. `name`: the member with the tool's name. If this is not a call, a stream in `keep` mode still
    has the text.
    """
    call = _Call(stream, out, is_unmarked)
    if not (yield from take_sign(stream, "{")):
        return "none"
    while (yield from _member(stream, call, name)):
        if (yield from take_sign(stream, ",")):
            continue
        is_bare = bool(call.name) and not (call.has_arguments or call.has_others or is_unmarked)
        if (yield from take_sign(stream, "}")) and is_bare:
            call.begin_arguments()
            call.arguments("{}")
            call.end_arguments()
        break
    return call.outcome


def read_keyed_call(stream: TextStream, out: CollectedReply) -> Steps[Outcome]:
    """Reads `{"NAME": {ARGUMENTS}}`. If this is not a call, the stream, which must `keep`, still has the text."""
    if not (yield from take_sign(stream, "{")):
        return "none"
    name = yield from read_string(stream)
    if not name or not (yield from take_sign(stream, ":")):
        return "none"
    yield from stream.blanks()
    if (yield from stream.peek()) != "{":
        return "none"
    stream.kept()
    out.begin(name)
    if not (yield from scan_value(stream, out.arguments)):
        return "torn"
    stream.keep()
    if (yield from take_sign(stream, "}")):
        stream.kept()
    else:
        stream.put_back()
    return "whole"


def _member(stream: TextStream, call: _Call, name_key: str) -> Steps[bool]:
    key = yield from read_string(stream)
    if key is None or not (yield from take_sign(stream, ":")):
        return False
    yield from stream.blanks()
    char = yield from stream.peek()
    if key == name_key and char == '"' and not call.name:
        name = yield from read_string(stream)
        if name:
            call.set_name(name)
        return bool(name)
    if key in ARGUMENTS and not call.has_arguments:
        is_whole = yield from (_quoted_arguments if char == '"' else _plain_arguments)(stream, call)
        if is_whole:
            call.end_arguments()
        return is_whole
    call.has_others = call.has_others or key not in IDS
    return (yield from scan_value(stream, ignore))


def _plain_arguments(stream: TextStream, call: _Call) -> Steps[bool]:
    begins = (yield from begins_object(stream)) if call.is_unmarked else (yield from stream.peek()) == "{"
    if not begins:
        return False
    call.begin_arguments()
    return (yield from scan_value(stream, call.arguments))


def _quoted_arguments(stream: TextStream, call: _Call) -> Steps[bool]:
    """Reads an object encoded as a string."""
    is_other = False

    def add(text: str) -> None:
        nonlocal is_other
        if not call.has_arguments:
            text = text.lstrip(BLANKS)
            is_other = is_other or not "{".startswith(text[:1])
            if is_other or not text:
                return
            call.begin_arguments()
        call.arguments(text)

    decoder = StringDecoder(add)
    is_string = yield from scan_string(stream, decoder.feed)
    decoder.finish()
    return is_string and call.has_arguments
