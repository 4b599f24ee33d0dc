"""Calls as `call:NAME{key:value,…}` between markers, as Gemma 4 and FunctionGemma write them.

Two special quotes surround a string, which needs no escapes; keys, numbers, `true` and `null` are bare. Clients receive
JSON: a string as it arrives, any other value once it is complete, converted to a type that its schema allows. If a call
never ends, its JSON has no closing brace. brace_guides.py builds the guides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_cluster.parsers.brace_guides import BraceGuides
from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import FREE, Node, Tool
from pd_cluster.parsers.irregular_readers import close_calls, read_torn
from pd_cluster.parsers.parameter_values import value_of
from pd_cluster.parsers.schema_types import Types, resolved, types_of
from pd_cluster.parsers.text_stream import Steps, TextStream

MAX_NAME_NUM_CHARS = 256
MAX_DEPTH = 64  # nested objects and lists in one call
PREFIXES = ("call:", ":")  # some models leave out "call"

_NAME = re.compile(r"[^\s{}<>|\"]+")
_NO_KEY = re.compile(r"[{}\[\],\n]")


@dataclass(frozen=True)
class BraceCalls:
    """Calls as `begin`, `call:NAME{…}` and `end`. `quote` surrounds a string.

    `quotes_all`: models also quote other values, so only the schema tells whether a quoted value is a string.
    """

    begin: str
    end: str
    quote: str
    quotes_all: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    # ---- reading

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        while (yield from stream.until((self.begin,), out.content)):
            stream.keep()
            stream.take(len(self.begin))
            yield from stream.blanks()
            if (yield from stream.begins(self.end)):
                stream.take(len(self.end))
                stream.kept()
            elif not (yield from self._read_one(stream, out)):
                stream.put_back()
                out.content(stream.take(len(self.begin)))

    def _read_one(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        """Reads one call. Returns False if the text is not a call, and leaves it in the stream."""
        for prefix in PREFIXES:
            if (yield from stream.begins(prefix)):
                stream.take(len(prefix))
                break
        pieces: list[str] = []
        yield from stream.short_until("{", MAX_NAME_NUM_CHARS, pieces.append)
        name = "".join(pieces).strip()
        if not _NAME.fullmatch(name):
            return False
        stream.kept()
        out.begin(name)
        values = _Values(self, stream, out)
        if (yield from values.read_object(out.schema_of(name))):
            yield from close_calls(stream, out, self.end, (self.begin,))
        elif (yield from read_torn(stream, out, (self.end, self.begin))) == self.end:
            stream.take(len(self.end))
        return True

    # ---- guides

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        return ["repeat", 1, most, ["seq", ["marker", self.begin], *self._one(given)]]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        return ["seq", ["repeat", 0, most, ["seq", ["until", self.begin], *self._one(given)]], FREE]

    def _one(self, given: Sequence[Tool]) -> list[Node]:
        return [["text", "call:"], BraceGuides(self.quote).call_of(given), ["marker", self.end]]


class _Values:
    """Reads the values of one call and emits them as JSON."""

    def __init__(self, form: BraceCalls, stream: TextStream, out: CollectedReply) -> None:
        self._form, self._stream, self._out = form, stream, out
        self._depth = 0

    def read_object(self, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Steps[bool]:
        """Takes `{…}`, even if the call ends before the closing braces. Returns False for any other text."""
        root = schema if root is None else root
        known = schema.get("properties")
        properties = known if isinstance(known, dict) else {}
        typed = {**root, "properties": properties}
        if not self._open():
            return False
        comma = ""
        while not (yield from self._closes("}")):
            key = yield from self._key()
            if key is None:
                return False
            self._out.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            is_whole = yield from self._value(properties.get(key), types_of(typed, key), root)
            if not is_whole or not (yield from self._goes_on("}")):
                return False
        yield from self._close("}")
        return True

    def _list(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Steps[bool]:
        if not self._open():
            return False
        items = schema.get("items")
        types = types_of({**root, "properties": {"": items}}, "")
        comma = ""
        while not (yield from self._closes("]")):
            self._out.arguments(comma)
            comma = ", "
            if not (yield from self._value(items, types, root)) or not (yield from self._goes_on("]")):
                return False
        yield from self._close("]")
        return True

    def _value(self, given: Any, types: Types, root: Mapping[str, Any]) -> Steps[bool]:
        """Takes one value. Returns False if no value follows."""
        yield from self._stream.blanks()
        char = yield from self._stream.peek()
        if char == "{":
            return (yield from self.read_object(resolved(given, root), root))
        if char == "[":
            return (yield from self._list(resolved(given, root), root))
        if (yield from self._stream.begins(self._form.quote)):
            self._stream.take(len(self._form.quote))
            return (yield from self._quoted(types))
        pieces: list[str] = []
        ends = (",", "}", "]", self._form.end)
        marker = yield from self._stream.until(ends, pieces.append, drops_cut=True)
        text = "".join(pieces).strip()
        self._out.arguments(value_of(text, types, "") if marker else text)
        return marker != ""

    def _quoted(self, types: Types) -> Steps[bool]:
        quote = self._form.quote
        is_text = types == {"string"} or (not self._form.quotes_all and (not types or "string" in types))
        if is_text:
            self._out.arguments('"')
            marker = yield from self._stream.until((quote,), self._add_text, drops_cut=True)
            self._out.arguments('"' if marker else "")
        else:
            pieces: list[str] = []
            marker = yield from self._stream.until((quote,), pieces.append, drops_cut=True)
            text = "".join(pieces)
            self._out.arguments(value_of(text, types, "") if marker else text)
        self._stream.take(len(marker))
        return marker != ""

    def _add_text(self, text: str) -> None:
        self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _key(self) -> Steps[str | None]:
        """Takes a key and its colon. If no key follows, takes nothing and returns None."""
        quote, pieces = self._form.quote, list[str]()
        is_quoted = yield from self._stream.begins(quote)
        self._stream.keep()
        if is_quoted:
            self._stream.take(len(quote))
        if not (yield from self._stream.short_until(quote if is_quoted else ":", MAX_NAME_NUM_CHARS, pieces.append)):
            self._stream.put_back()
            return None
        key = "".join(pieces)
        if is_quoted:
            self._stream.take(len(quote))
            yield from self._stream.blanks()
        if (yield from self._stream.peek()) != ":" or (not is_quoted and (_NO_KEY.search(key) or not key.strip())):
            self._stream.put_back()
            return None
        self._stream.take(1)
        self._stream.kept()
        return key if is_quoted else key.strip()

    def _goes_on(self, closer: str) -> Steps[bool]:
        """Takes a comma, if any. Returns whether a comma or the closing bracket follows."""
        yield from self._stream.blanks()
        if (yield from self._stream.peek()) == ",":
            self._stream.take(1)
            return True
        return (yield from self._closes(closer))

    def _closes(self, closer: str) -> Steps[bool]:
        """Returns whether the closing bracket, or the end of the call, comes next."""
        yield from self._stream.blanks()
        return (yield from self._stream.peek()) == closer or (yield from self._stream.begins(self._form.end))

    def _open(self) -> bool:
        if self._depth == MAX_DEPTH:
            return False
        self._depth += 1
        self._out.arguments(self._stream.take(1))
        return True

    def _close(self, closer: str) -> Steps[None]:
        """Takes the closing bracket, unless the call ends without it."""
        self._depth -= 1
        if (yield from self._stream.peek()) == closer:
            self._stream.take(1)
        self._out.arguments(closer)
