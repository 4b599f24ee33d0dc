"""Calls as JSON between markers: whole objects, arrays of objects, or a name and then its arguments.

Each class describes a model's markup. Text that only looks like a call is passed on as content, and so is text after a
call that never ends. If a call's arguments become invalid JSON, the call keeps the text up to the closing marker, the
next call or the end. An empty pair of markers is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pd_cluster.parsers.collected_reply import CollectedReply, read_call, read_keyed_call
from pd_cluster.parsers.guide_nodes import BLANK, FREE, MAX_CALLS, Node, Tool, array_schema, call_schema, object_of
from pd_cluster.parsers.irregular_readers import close_calls, read_objects, read_torn
from pd_cluster.parsers.json_scan import scan_value
from pd_cluster.parsers.text_stream import Steps, TextStream

MAX_NAME_NUM_CHARS = 256  # with the texts around it
_CLEAN_NAME = re.compile(r"[^\s{}\"<>|]+")


@dataclass(frozen=True)
class JsonCalls:
    """Calls as `begin`, `{"name": …, "arguments": …}` (an array of these if `is_array`), and `end`, if any."""

    begin: str
    end: str = ""
    is_array: bool = False
    begins: tuple[str, ...] = ()  # alternatives to `begin`
    key: str = "arguments"  # the arguments' member in guides; if empty, a call is `{NAME: ARGUMENTS}`
    pieces: tuple[str, ...] = ()  # the tokens that some tokenizers make of `begin`
    is_word: bool = False  # `begin` is an ordinary word, and begins calls only if an array follows directly
    name: str = "name"  # the member with the tool's name
    call_id: str = ""  # the member with the call's number, if any

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.begin, *self.begins, *self.pieces, self.end) if text)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        starts = (self.begin, *self.begins)
        ends = tuple(text for text in (self.end, *(() if self.is_word else starts)) if text)
        while begin := (yield from stream.until(starts, out.content)):
            stream.keep()
            stream.take(len(begin))
            if not self.is_word:
                yield from stream.blanks()
            if self.end and (yield from stream.begins(self.end)):
                stream.take(len(self.end))
                stream.kept()
                continue
            if not (yield from self._objects(stream, out, ends)):
                out.content(stream.take(len(begin)))
            elif self.end:
                yield from close_calls(stream, out, self.end, starts)

    def _objects(self, stream: TextStream, out: CollectedReply, ends: Sequence[str]) -> Steps[bool]:
        if self.is_word and (yield from stream.peek()) != "[":
            stream.put_back()
            return False
        return (
            yield from read_objects(
                stream, out, ends, read_one=partial(read_call, name=self.name) if self.key else read_keyed_call
            )
        )

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        if self.is_array:
            return ["seq", self._begin(), *self._array(given, most)]
        return ["repeat", 1, most, ["seq", self._begin(), *self._one(given)]]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        if self.is_word:
            most = most or MAX_CALLS
            return ["seq", ["repeat", 0, most, ["seq", ["until", f"{self.begin}["], *self._items(given, most)]], FREE]
        body = self._array(given, most or MAX_CALLS) if self.is_array else self._one(given)
        return ["seq", ["repeat", 0, most, ["seq", ["until", self.begin, *self.begins], *body]], FREE]

    def _begin(self) -> Node:
        return ["any", *(["marker", text] for text in (self.begin, *self.begins))]

    def _one(self, given: Sequence[Tool]) -> list[Node]:
        return [BLANK, ["json", call_schema(given, self.key, self.name, self.call_id)], *self._end()]

    def _array(self, given: Sequence[Tool], most: int) -> list[Node]:
        gap = [] if self.is_word else [BLANK]
        return [*gap, ["json", array_schema(given, self.key, most, self.name, self.call_id)], *self._end()]

    def _items(self, given: Sequence[Tool], most: int) -> list[Node]:
        """Returns the nodes after an array's opening bracket."""
        call: list[Node] = [BLANK, ["json", call_schema(given, self.key, self.name, self.call_id)], BLANK]
        return [*call, ["repeat", 0, most - 1, ["seq", ["text", ","], *call]], ["text", "]"], *self._end()]

    def _end(self) -> list[Node]:
        return [["marker", self.end]] if self.end else []


@dataclass(frozen=True)
class NamedCalls:
    """Each call is `begin`, `head`, the name, `tail`, `separator`, arguments, `fence` and `end`."""

    begin: str
    separator: str
    end: str
    opening: str = ""  # if given, `opening` and `closing` surround all calls of a reply
    closing: str = ""
    head: tuple[Node, ...] = ()  # the guide's nodes before the name
    tail: tuple[Node, ...] = ()  # the guide's nodes after the name
    around: str = ""  # a regex; without its matches, the text before the separator is the name
    fence: str = ""
    pieces: tuple[str, ...] = ()  # the tokens that some tokenizers make of these texts

    @property
    def markers(self) -> tuple[str, ...]:
        inner = [node[1] for node in (*self.head, *self.tail) if node[0] == "marker"]
        tags = (self.opening, self.begin, self.separator, self.end, self.closing, *inner, *self.pieces)
        return tuple(text for text in tags if text)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        starts = tuple(text for text in (self.opening, self.begin) if text)
        closings = (self.closing,) if self.closing else ()
        while marker := (yield from stream.until(starts + closings, out.content)):
            stream.keep()
            stream.take(len(marker))
            if (marker == self.closing and out.num_seen) or (yield from self._is_empty(stream, marker)):
                stream.kept()
            elif not (yield from self._read_one(stream, out, marker, (*starts, *closings))):
                stream.put_back()
                out.content(stream.take(len(marker)))

    def _is_empty(self, stream: TextStream, marker: str) -> Steps[bool]:
        """Takes the matching closing marker, if only blanks precede it."""
        if marker == self.closing:
            return False
        yield from stream.blanks()
        end = self.closing if marker == self.opening else self.end
        is_empty = yield from stream.begins(end)
        stream.take(len(end) if is_empty else 0)
        return is_empty

    def _read_one(self, stream: TextStream, out: CollectedReply, marker: str, others: Sequence[str]) -> Steps[bool]:
        """Reads the first call of a section, or a call outside of sections. Returns False if there is no call."""
        if marker != self.begin and (marker == self.closing or not (yield from self._begins(stream))):
            return False
        name = yield from self._name(stream)
        if name:
            yield from stream.blanks()
        if not name or (yield from stream.peek()) != "{":
            return False
        stream.kept()
        out.begin(name)
        if (yield from scan_value(stream, out.arguments)):
            if self.fence:
                yield from stream.take_after_blanks(self.fence)
            yield from close_calls(stream, out, self.end, others)
        elif (yield from read_torn(stream, out, (self.end, *others))) == self.end:
            stream.take(len(self.end))
        return True

    def _begins(self, stream: TextStream) -> Steps[bool]:
        """Takes a call's `begin`, which models may leave out before a mark that precedes the name."""
        if (yield from stream.begins(self.begin)):
            stream.take(len(self.begin))
            return True
        marks = [node[1] for node in self.head[:1] if node[0] == "marker"]
        return bool(marks) and (yield from stream.begins(marks[0]))

    def _name(self, stream: TextStream) -> Steps[str]:
        """Takes the text up to and including the separator. Returns the name in it; "" if there is none."""
        pieces: list[str] = []
        if not (yield from stream.short_until(self.separator, MAX_NAME_NUM_CHARS, pieces.append)):
            return ""
        stream.take(len(self.separator))
        name = re.sub(self.around, "", "".join(pieces)).strip() if self.around else "".join(pieces).strip()
        return name if _CLEAN_NAME.fullmatch(name) else ""

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        calls: Node = ["repeat", 1, most, ["seq", ["marker", self.begin], *self._one(given)]]
        if not self.opening:
            return calls
        return ["seq", ["marker", self.opening], calls, ["marker", self.closing]]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        one: Node = ["seq", *self._one(given)]
        if not self.opening:
            return ["seq", ["repeat", 0, most, ["seq", ["until", self.begin], one]], FREE]
        more: Node = ["repeat", 0, None if most is None else most - 1, ["seq", ["marker", self.begin], one]]
        opened: Node = ["any", ["seq", ["until", self.opening], ["marker", self.begin]], ["until", self.begin]]
        section: Node = ["seq", opened, one, more, ["repeat", 0, 1, ["marker", self.closing]]]
        return ["seq", ["repeat", 0, most, section], FREE]

    def _one(self, given: Sequence[Tool]) -> list[Node]:
        named: list[Node] = [
            ["seq", ["text", tool.name], *self.tail, ["marker", self.separator], BLANK, ["json", object_of(tool)]]
            for tool in given
        ]
        fence: list[Node] = [["marker", self.fence]] if self.fence else []
        return [*self.head, ["any", *named], *fence, ["marker", self.end]]
