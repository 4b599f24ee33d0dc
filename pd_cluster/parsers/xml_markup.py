"""Calls whose arguments are parameters between tags, as Qwen3-Coder, GLM, Seed-OSS and MiniMax write them.

A parameter's text is a string if its schema says so, and is then passed on as it comes, as JSON; any other is read
whole, and is JSON if its schema allows that, otherwise a string (parameter_values.py). A value without its
end marker ends where the next parameter begins or the call ends. Text between parameters is content. A
call that never ends has no closing brace, so clients see that it is incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import BLANK, FREE, Node, Tool
from pd_cluster.parsers.irregular_readers import close_calls
from pd_cluster.parsers.parameter_values import TextValue, value_of
from pd_cluster.parsers.schema_types import Types, plain_texts, resolved, types_of
from pd_cluster.parsers.text_stream import Emit, Steps, TextStream, ignore, without_cut
from pd_cluster.parsers.tool_schema import REMARKS, must_be_plain, refused, schema_of

MAX_NAME_NUM_CHARS = 256
FOLLOWED_IN_TEXT = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format", "default", "examples"}


@dataclass(frozen=True)
class XmlCalls:
    """`begin`, then calls, then `end`. A call: the name between `name`'s texts, parameters, `close`.

    A parameter: its key between `key`'s texts, its value between `value`'s. `line`: a newline that is written around a
    value and is not part of it. `lone`: models also write a call without `begin`.
    """

    begin: str
    end: str
    name: tuple[str, str]
    close: str
    key: tuple[str, str]
    value: tuple[str, str]
    line: str = ""
    lone: bool = False
    is_section: bool = False  # several calls may stand between `begin` and `end`

    @property
    def markers(self) -> tuple[str, ...]:
        tags = (self.begin, self.end, self.close, *self.name, *self.key, *self.value)
        return tuple(text for text in tags if text.startswith("<") and text.endswith(">"))

    # ---- reading

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        starts = (self.begin, self.name[0]) if self.lone else (self.begin,)
        while marker := (yield from stream.until(starts, out.content)):
            stream.keep()
            if marker == self.begin:
                stream.take(len(marker))
                yield from stream.blanks()
                if (yield from stream.begins(self.end)):
                    stream.take(len(self.end))
                    stream.kept()
                    continue
            if not (yield from self._read_one(stream, out)):
                out.content(stream.take(len(marker)))
            elif marker == self.begin:
                yield from self._read_more(stream, out)
            else:
                yield from stream.take_after_blanks(self.end)

    def _read_more(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        """Reads up to the end of what `begin` has opened: perhaps more calls."""
        starts = tuple(text for text in (self.begin, self.name[0]) if text)
        while (marker := (yield from close_calls(stream, out, self.end, starts))) and marker != self.begin:
            stream.keep()
            if not (yield from self._read_one(stream, out)):
                out.content(stream.take(len(marker)))

    def _read_one(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        """Reads one call. Returns False if there is none; then what the stream keeps is put back."""
        name = yield from self._name(stream)
        if not name or (out.is_damaged and not out.has_tool(name)):
            stream.put_back()
            return False
        stream.kept()
        call = _TagCall(name, out)
        out.begin(name)
        out.arguments("{")
        out.in_call = True
        while (marker := (yield from self._between(stream, out))) == self.key[0]:
            yield from self._parameter(stream, call)
        if marker:
            out.arguments("}")
        else:
            out.cut()
        if marker and marker == self.close:
            stream.take(len(marker))
        out.in_call = False
        return True

    def _between(self, stream: TextStream, out: CollectedReply) -> Steps[str]:
        """Takes text up to a tag of a call: content, but for blanks before it and a tag that the end cuts short."""
        yield from stream.blanks()
        return (yield from stream.until(self._tags, out.content, drops_cut=True))

    @property
    def _tags(self) -> tuple[str, ...]:
        """Returns what may follow within a call, or end it."""
        return tuple(text for text in (self.key[0], self.close, self.end, self.begin, self.name[0]) if text)

    def _name(self, stream: TextStream) -> Steps[str]:
        """Takes the name and the texts around it; "" if there is none."""
        before, after = self.name
        if not (yield from stream.begins(before)):
            return ""
        stream.take(len(before))
        pieces: list[str] = []
        ends = (after,) if after else (self.key[0], self.end)
        if not (yield from stream.short_until(ends, MAX_NAME_NUM_CHARS, pieces.append)):
            return ""
        stream.take(len(after))
        name = "".join(pieces).strip()
        return name if name and not re.search(r"[\s<>{}\"]", name) else ""

    def _parameter(self, stream: TextStream, call: _TagCall) -> Steps[None]:
        """Reads one parameter. Its key alone is text between parameters, or at the end of everything torn arguments."""
        stream.keep()
        key = yield from self._key(stream)
        if key is None:
            is_over = not (yield from stream.peek())
            stream.put_back()
            before = stream.take(len(self.key[0]))
            if is_over:
                yield from stream.until((), lambda text: call.torn_key(without_cut(text, self.key[1:])))
            else:
                call.out.content(before)
            return
        stream.kept()
        types = call.begin_value(key)
        if types == {"string"}:
            call.out.arguments('"')
            text = TextValue(self.line, call.add_text)
            end = yield from self._value_end(stream, call, text.add)
            if end == "closed":
                text.close()
            call.out.arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from self._value_end(stream, call, pieces.append)
            shown = "".join(pieces)
            call.out.arguments(value_of(shown, types, self.line) if end else shown.strip())

    def _key(self, stream: TextStream) -> Steps[str | None]:
        """Takes a parameter's text up to its value; None if this is none."""
        stream.take(len(self.key[0]))
        pieces: list[str] = []
        if not (yield from stream.short_until(self.key[1], MAX_NAME_NUM_CHARS, pieces.append)):
            if (yield from stream.ends_within(MAX_NAME_NUM_CHARS)):
                yield from stream.until((), ignore)
            return None
        key = "".join(pieces).strip()
        if not key or re.search(r"[<>\n]", key):
            return None
        stream.take(len(self.key[1]))
        if self.value[0]:
            yield from stream.blanks()
            if not (yield from stream.comes_or_is_cut(self.value[0])):
                return None
        return key

    def _value_end(self, stream: TextStream, call: _TagCall, emit: Emit) -> Steps[Literal["closed", "open", ""]]:
        """Takes a value's text. Returns whether its end marker follows, or a tag that shows that it is missing; "" at
        the end.
        """
        closing = self.value[1]
        while marker := (yield from stream.until((closing, *self._tags), emit)):
            if marker == closing:
                stream.take(len(closing))
                return "closed"
            stream.keep()
            ends = yield from self._ends_value(stream, marker, call)
            stream.put_back()
            if ends:
                call.out.is_damaged = True  # a guide would read on: only tools that were given are called from here on
                return "open"
            emit(stream.take(len(marker)))
        return ""

    def _ends_value(self, stream: TextStream, marker: str, call: _TagCall) -> Steps[bool]:
        """Returns whether a tag within a value is one of the call's, and not text of the value: it leads to a parameter
        or a call that there can be, or to the end of this one.
        """
        if marker == self.key[0]:
            key = yield from self._key(stream)
            return key is not None and call.may_have(key)
        if marker in (self.close, self.end):
            stream.take(len(marker))
            yield from stream.blanks()
            following = (self.begin, *((self.end, self.name[0]) if marker == self.close else ()))
            for tag in filter(None, following):
                if (yield from stream.begins(tag)):
                    return True
            return not (yield from stream.peek())
        if marker == self.begin:
            stream.take(len(marker))
            yield from stream.blanks()
        return call.out.has_tool((yield from self._name(stream)))

    # ---- guides

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        if self.is_section:
            many: Node = ["repeat", 1, most, self._one(given)]
            return ["seq", ["marker", self.begin], many, ["marker", self.end]]
        return ["repeat", 1, most, ["seq", ["marker", self.begin], self._one(given), ["marker", self.end]]]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        if self.is_section:
            many: Node = ["repeat", 1, most, self._one(given)]
            section: Node = ["seq", ["until", self.begin], many, ["marker", self.end]]
            return ["seq", ["repeat", 0, most, section], FREE]
        begun: Node = ["seq", ["until", self.begin], *self._opening]
        end: Node = ["marker", self.end]
        if self.lone:
            begun, end = ["any", begun, ["until", self.name[0]]], ["repeat", 0, 1, end]
        return ["seq", ["repeat", 0, most, ["seq", begun, self._named(given), end]], FREE]

    def _one(self, given: Sequence[Tool]) -> Node:
        return ["seq", *self._opening, self._named(given)]

    def _named(self, given: Sequence[Tool]) -> Node:
        """Returns the node of a call from its name on."""
        return ["any", *map(self._tool, given)]

    def _tool(self, tool: Tool) -> Node:
        parameters: list[Node] = []
        if not tool.parameters:  # anything goes
            key = self._key_of(["pattern", r"[A-Za-z0-9_.-]{1,64}"])
            parameters = [["repeat", 0, None, ["seq", *key, ["until", self.value[1]]]]]
        else:
            must_be_plain(tool)
            required = tool.parameters.get("required", [])
            properties: dict[str, Any] = tool.parameters.get("properties", {})
            for name in dict.fromkeys((*properties, *required)):
                value = self._value(tool, name, properties.get(name, True))
                one: Node = ["seq", *self._key_of(["text", name]), *value]
                parameters.append(one if name in required else ["repeat", 0, 1, one])
        close: list[Node] = [["marker", self.close]] if self.close else []
        return ["seq", ["text", f"{tool.name}{self.name[1]}"], *parameters, *close]

    def _key_of(self, name: Node) -> list[Node]:
        """Returns the nodes up to the value's first character, without a line's newline."""
        before, after = self.key
        opening: list[Node] = [["marker", self.value[0]]] if self.value[0] else []
        return [["marker", before], name, ["exact", after], *opening]

    @property
    def _opening(self) -> list[Node]:
        """Returns what comes before a name. Blanks belong to a marker: elsewhere a guide would have to look ahead."""
        return [["marker", self.name[0]]] if self.name[0] else [BLANK]

    def _value(self, tool: Tool, name: str, given: Any) -> list[Node]:
        """Returns the nodes of a value and of its end."""
        schema = resolved(given, tool.parameters)
        line: list[Node] = [["text", self.line]] if self.line else []
        end: Node = ["exact", self.value[1]]
        if types_of(tool.parameters, name) != {"string"}:
            return [*line, ["json", schema_of(tool, given)], *line, end]
        if others := sorted(set(schema) - FOLLOWED_IN_TEXT - REMARKS):
            raise refused(tool, f"{others[0]} of {name}")
        if (texts := plain_texts(schema)) is not None:
            return [*line, ["any", *(["text", text] for text in texts)], *line, end]
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if pattern := schema.get("pattern"):
            if least or most is not None or not (pattern.startswith("^") and pattern.endswith("$")):
                raise refused(tool, f"pattern of {name}, unless it is from ^ to $ and has no lengths beside it,")
            return [*line, ["pattern", pattern[1:-1].replace("/", r"\/")], *line, end]
        if least or most is not None:
            return [*line, ["pattern", f"[^<\\n]{{{least},{'' if most is None else most}}}"], *line, end]
        return [*line, ["until", f"{self.line}{self.value[1]}"]] if self.line else [["until", self.value[1]]]


class _TagCall:
    """The call that is being read."""

    def __init__(self, name: str, out: CollectedReply) -> None:
        self.out = out
        self._schema = out.schema_of(name)
        self._keys: set[str] = set()

    def may_have(self, key: str) -> bool:
        """Returns whether a parameter of this name may follow."""
        known = self._schema.get("properties")
        return key not in self._keys and (not isinstance(known, dict) or not known or key in known)

    def begin_value(self, key: str) -> Types:
        """Writes a parameter's name. Returns its types."""
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self.out.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        return types_of(self._schema, key)

    def torn_key(self, text: str) -> None:
        """Writes the beginning of a parameter's name."""
        self.out.arguments(("," if self._keys else "") + json.dumps(text.strip(), ensure_ascii=False)[:-1])

    def add_text(self, text: str) -> None:
        self.out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
