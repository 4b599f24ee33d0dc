"""Calls whose arguments are nested elements with a mark before each tag, as MiniMax M3 writes them.

    ]<]minimax[>[<invoke name="f">]<]minimax[>[<days>]<]minimax[>[<item>2]<]minimax[>[</item>]<]minimax[>[</days>…

A text argument is passed on as it arrives. Any other argument is read whole and converted to JSON by its schema. An
element without an end tag ends with its parent or with the call. Text between arguments is content. If a call never
ends, its JSON has no closing brace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.nested_guides import optional_elements, required_elements
from pd_cluster.parsers.nested_tags import ITEM, NestedTags
from pd_cluster.parsers.parameter_values import value_of
from pd_cluster.parsers.schema_types import Types, resolved, types_in
from pd_cluster.parsers.text_stream import Emit, Steps, TextStream
from pd_cluster.parsers.xml_tags import TEXT

MAX_NAME_NUM_CHARS = 256
MAX_DEPTH = 64  # nested elements in one argument; deeper elements are text
TEXT_MEMBER = "$text"  # the member for text next to elements

_NAME = re.compile(r"[^\s<>{}\"/]+")


@dataclass(frozen=True)
class NestedCalls(NestedTags):
    """Reads calls with nested elements, and makes their guides."""

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        return required_elements(self, given, most)

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        return optional_elements(self, given, most)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        while (yield from stream.until((self.begin,), out.content)):
            stream.keep()
            stream.take(len(self.begin))
            yield from stream.blanks()
            if (yield from stream.begins(self.end)):
                stream.take(len(self.end))
                stream.kept()
            elif (yield from self._read_one(stream, out)):
                yield from self._read_more(stream, out)
            else:
                out.content(stream.take(len(self.begin)))

    def _read_more(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        """Reads further calls, if any, up to the end of a section."""
        ends = (self.begin, self.end)
        while not (yield from stream.take_after_blanks(self.end)):
            marker = yield from stream.until((*ends, self.call), out.content)
            if marker == self.begin:
                return
            stream.keep()
            if marker == self.call and not (yield from self._read_one(stream, out)):
                out.content(stream.take(len(marker)))

    def _read_one(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        """Reads one call. If there is none, puts the kept text back and returns False."""
        name = ""
        if (yield from stream.begins(self.call)):
            stream.take(len(self.call))
            name = yield from self._inside(stream, '">')
        if not name:
            stream.put_back()
            return False
        stream.kept()
        call = _ElementCall(out.schema_of(name), out)
        out.begin(name)
        out.arguments("{")
        out.in_call = True
        is_open = True
        while is_open:
            is_open = yield from self._argument(stream, call)
        out.in_call = False
        return True

    def _argument(self, stream: TextStream, call: _ElementCall) -> Steps[bool]:
        """Reads one argument or the call's end. Returns whether more may follow."""
        yield from stream.blanks()
        if not (yield from stream.until((self.tag,), call.out.content, drops_cut=True)):
            call.out.cut()
            return False
        if (yield from self._ends_call(stream)):
            call.out.arguments("}")
            if (yield from stream.begins(self.close)):
                stream.take(len(self.close))
            return False
        stream.keep()
        stream.take(len(self.tag))
        key = yield from self._inside(stream, ">")
        if not key:
            stream.put_back()
            call.out.content(stream.take(len(self.tag)))
            return True
        stream.kept()
        given = call.begin_value(key)
        if types_in(given, call.schema) == TEXT:
            call.out.arguments('"')
            ends = yield from self._text(stream, key, call.add_text)
            call.out.arguments('"' if ends else "")
        else:
            element = _Element(key)
            yield from self._tree(stream, element)
            call.out.arguments(_as_json(element, given, call.schema))
        return True

    def _inside(self, stream: TextStream, end: str) -> Steps[str]:
        """Takes the rest of a tag and returns its name; "" if there is none."""
        pieces: list[str] = []
        if not (yield from stream.short_until(end, MAX_NAME_NUM_CHARS, pieces.append)):
            return ""
        stream.take(len(end))
        name = "".join(pieces)
        return name if _NAME.fullmatch(name) else ""

    def _ends_call(self, stream: TextStream) -> Steps[bool]:
        """Returns whether the next tag ends the call, or can only come after its end."""
        for text in (self.close, self.end, self.begin, self.call):
            if (yield from stream.begins(text)):
                return True
        return False

    def _text(self, stream: TextStream, key: str, emit: Emit) -> Steps[bool]:
        """Takes a text up to the end of its element. Returns False if the reply ends first."""
        end = f"{self.tag}/{key}>"
        while (yield from stream.until((self.tag,), emit)):
            if (yield from stream.begins(end)):
                stream.take(len(end))
                return True
            if (yield from self._ends_call(stream)):
                return True
            emit(stream.take(len(self.tag)))
        return False

    def _tree(self, stream: TextStream, top: _Element) -> Steps[None]:
        """Takes an element's text and child elements."""
        opened = [top]
        while opened and (yield from stream.until((self.tag,), lambda text: opened[-1].text.append(text))):
            names = [each.name for each in opened]
            for at in range(len(names) - 1, -1, -1):
                end = f"{self.tag}/{names[at]}>"
                if (yield from stream.begins(end)):
                    stream.take(len(end))
                    del opened[at:]
                    break
            else:
                yield from self._inner(stream, opened)

    def _inner(self, stream: TextStream, opened: list[_Element]) -> Steps[None]:
        """Takes an opening tag, or text that looks like one. If the tag ends the call, it also ends all elements."""
        for text in (self.close, self.end, self.call):
            if (yield from stream.begins(text)):
                opened.clear()
                return
        stream.keep()
        stream.take(len(self.tag))
        name = yield from self._inside(stream, ">")
        if not name or len(opened) == MAX_DEPTH:
            stream.put_back()
            opened[-1].text.append(stream.take(len(self.tag)))
            return
        stream.kept()
        element = _Element(name)
        opened[-1].children.append(element)
        opened.append(element)


@dataclass
class _Element:
    name: str
    text: list[str] = field(default_factory=list)
    children: list[_Element] = field(default_factory=list)


@dataclass
class _ElementCall:
    """The call that is being read."""

    schema: Mapping[str, Any]
    out: CollectedReply
    has_some: bool = False

    def begin_value(self, key: str) -> Any:
        """Writes an argument's name. Returns its schema."""
        comma = ", " if self.has_some else ""
        self.has_some = True
        self.out.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        return _member(self.schema, key)

    def add_text(self, text: str) -> None:
        self.out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _member(schema: Mapping[str, Any], key: str) -> Any:
    """Returns the schema of a member."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def _as_json(element: _Element, given: Any, root: Mapping[str, Any]) -> str:
    """Returns an element's JSON text. Without a schema, texts become strings, and elements become members."""
    types, text = types_in(given, root), "".join(element.text)
    if not element.children:
        return _leaf(text, types)
    are_items = not text.strip() and ("object" not in types or all(each.name == ITEM for each in element.children))
    if "array" in types and are_items:
        items = _alternative(given, root, "array").get("items")
        return f"[{', '.join(_as_json(each, items, root) for each in element.children)}]"
    schema = _alternative(given, root, "object")
    found: dict[str, list[str]] = {}
    for each in element.children:
        found.setdefault(each.name, []).append(_as_json(each, _member(schema, each.name), root))
    if text.strip():
        beside = TEXT_MEMBER
        while beside in found:
            beside = f"${beside}"
        found[beside] = [json.dumps(text, ensure_ascii=False)]
    members = {name: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for name, values in found.items()}
    return f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: {value}' for name, value in members.items())}}}"


def _leaf(text: str, types: Types) -> str:
    if not text.strip() and types and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return value_of(text, types, "") if types and types != TEXT else json.dumps(text, ensure_ascii=False)


def _alternative(given: Any, root: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    """Returns the schema or its first alternative of this type; {} if there is none."""
    schema = resolved(given, root)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return next((each for one in schema[key] if (each := _alternative(one, root, wanted))), {})
    return schema if wanted in types_in(schema, root) or not types_in(schema, root) else {}
