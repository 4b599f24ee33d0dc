"""Calls whose arguments are parameters between tags, as Qwen3-Coder, GLM, Seed-OSS and MiniMax write them.

A parameter's text is a string if its schema says so, and is then passed on as it comes, as JSON; any other is read
whole, and is JSON if it is a value of one of its schema's types, otherwise a string. A call that never ends has no
closing brace, so clients see that it is incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_cluster.parsers.calls import Gathered
from pd_cluster.parsers.nodes import BLANK, FREE, Node, Tool
from pd_cluster.parsers.schema_types import Types, plain_texts, resolved, types_of
from pd_cluster.parsers.stream import Emit, Steps, TextStream, ignore
from pd_cluster.parsers.tool_schema import REMARKS, must_be_plain, refused, schema_of

MAX_NAME_NUM_CHARS = 256
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
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

    def read(self, stream: TextStream, out: Gathered) -> Steps[None]:
        starts = (self.begin, self.name[0]) if self.lone else (self.begin,)
        while marker := (yield from stream.until(starts, out.content)):
            stream.keep()
            if marker == self.begin:
                stream.take(len(marker))
                yield from stream.blanks()
            is_whole = yield from self._read_one(stream, out)
            while is_whole and self.is_section and (yield from stream.begins_after_blanks(self.name[0])):
                stream.keep()
                is_whole = yield from self._read_one(stream, out)
            if is_whole and (yield from stream.begins_after_blanks(self.end)):
                stream.take(len(self.end))

    def _read_one(self, stream: TextStream, out: Gathered) -> Steps[bool]:
        """Returns whether a call was read to its end."""
        name = yield from self._name(stream)
        if not name:
            out.content(stream.kept())
            return False
        stream.kept()
        out.begin(name)
        out.arguments("{")
        ends = tuple(text for text in (self.close, self.end) if text)
        comma = ""
        while (marker := (yield from stream.until((self.key[0], *ends), ignore))) == self.key[0]:
            if not (yield from self._parameter(stream, out, name, comma)):
                return False
            comma = ", "
        if not marker:
            return False
        out.arguments("}")
        if marker == self.close:
            stream.take(len(marker))
        return True

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

    def _parameter(self, stream: TextStream, out: Gathered, name: str, comma: str) -> Steps[bool]:
        """Reads one parameter. Returns whether it is complete."""
        stream.take(len(self.key[0]))
        key: list[str] = []
        if not (yield from stream.short_until(self.key[1], MAX_NAME_NUM_CHARS, key.append)):
            return False
        stream.take(len(self.key[1]))
        if self.value[0]:
            if not (yield from stream.begins_after_blanks(self.value[0])):
                return False
            stream.take(len(self.value[0]))
        written = "".join(key).strip()
        out.arguments(f"{comma}{json.dumps(written, ensure_ascii=False)}: ")
        types = types_of(out.schema_of(name), written)
        end = self.value[1]
        if types == {"string"}:
            out.arguments('"')
            text = _Lines(self.line, lambda piece: out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1]))
            is_whole = bool((yield from stream.until((end,), text.add)))
            if is_whole:
                text.end()
                out.arguments('"')
        else:
            pieces: list[str] = []
            is_whole = bool((yield from stream.until((end,), pieces.append)))
            shown = "".join(pieces)
            out.arguments(value_of(shown, types, self.line) if is_whole else shown.strip())
        if is_whole:
            stream.take(len(end))
        return is_whole

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


class _Lines:
    """Emits text without one newline at each end, if `line` is one."""

    def __init__(self, line: str, emit: Emit) -> None:
        self._line, self._emit = line, emit
        self._is_first, self._held = True, ""

    def add(self, text: str) -> None:
        if self._line and self._is_first and text:
            self._is_first = False
            text = text.removeprefix(self._line)
        text = self._held + text
        self._held = self._line if self._line and text.endswith(self._line) else ""
        if shown := text.removesuffix(self._held):
            self._emit(shown)

    def end(self) -> None:
        """Drops the newline that was held back."""


def value_of(text: str, types: Types, line: str) -> str:
    """Returns a parameter's JSON text. `types`: those that its schema allows; empty: not known."""
    shown = text.strip()
    shown = PYTHON_NAMES.get(shown, shown)
    try:
        value = json.loads(shown, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = None
        is_json = False
    else:
        is_json = not types or bool(_kinds(value) & types)
    if is_json:
        return shown
    return json.dumps(text.removeprefix(line).removesuffix(line) if line else text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _kinds(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case None:
            return {"null"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}
