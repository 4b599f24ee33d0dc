"""Calls with arguments as parameters between tags, as Qwen3-Coder, GLM, DeepSeek V3.2 and many others write them.

If a parameter's schema or tag says string, its text is passed on as a JSON string as it arrives. Other values are read
whole; they become JSON if the schema allows it, otherwise a string (parameter_values.py). A value without an end marker
ends at the next parameter or the call's end. Text between parameters is content. If a call never ends, its JSON has no
closing brace, so that clients see that it is incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.irregular_readers import close_calls
from pd_cluster.parsers.parameter_values import TextValue, members_of, value_of
from pd_cluster.parsers.schema_types import Types, types_of
from pd_cluster.parsers.text_stream import Emit, Steps, TextStream, ignore, without_cut
from pd_cluster.parsers.xml_guides import optional_calls, required_calls
from pd_cluster.parsers.xml_tags import TEXT, XmlTags, present

MAX_NAME_NUM_CHARS = 256


@dataclass(frozen=True)
class XmlCalls(XmlTags):
    """Reads calls with parameters between tags, and makes their guides."""

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        return required_calls(self, given, most)

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        return optional_calls(self, given, most)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        starts = present(*self.all_begins, self.name[0] if self.lone else "", *self.fillers)
        while marker := (yield from stream.until(starts, out.content)):
            stream.keep()
            if marker in self.all_begins:
                stream.take(len(marker))
                yield from self._fillers(stream)
                if (yield from stream.begins(self.end)):
                    stream.take(len(self.end))
                    stream.kept()
                    continue
            elif marker in self.fillers:
                stream.take(len(marker))
                stream.kept()
                continue
            if not (yield from self._read_one(stream, out)):
                out.content(stream.take(len(marker)))
            elif marker in self.all_begins:
                yield from self._read_more(stream, out)
            else:
                yield from stream.take_after_blanks(self.end)

    def _fillers(self, stream: TextStream) -> Steps[None]:
        """Takes blanks and fillers."""
        is_more = True
        while is_more:
            yield from stream.blanks()
            is_more = False
            for text in self.fillers:
                if (yield from stream.begins(text)):
                    stream.take(len(text))
                    is_more = True

    def _read_more(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        """Reads further calls, if any, up to the end of the section."""
        starts = present(*self.fillers, *(text for text in self.all_begins if text not in self.fillers), self.name[0])
        while marker := (yield from close_calls(stream, out, self.end, starts)):
            if marker in self.fillers:
                stream.take(len(marker))
                continue
            if marker in self.all_begins:
                return
            stream.keep()
            if not (yield from self._read_one(stream, out)):
                out.content(stream.take(len(marker)))

    def _read_one(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        """Reads one call. If there is none, puts the kept text back and returns False."""
        name = yield from self._name(stream)
        if not name or ((out.is_damaged or self.needs_tool) and not out.has_tool(name)):
            stream.put_back()
            return False
        stream.kept()
        call = _TagCall(name, out)
        out.begin(name)
        out.arguments("{")
        out.in_call = True
        marker = yield from self._between(stream, out)
        while marker and marker in (*self.all_keys, self.body[0]):
            yield from (self._parameter if marker in self.all_keys else self._body)(stream, call, marker)
            marker = yield from self._between(stream, out)
        if marker:
            out.arguments("}")
        else:
            out.cut()
        if marker and marker == self.close:
            stream.take(len(marker))
        out.in_call = False
        return True

    def _between(self, stream: TextStream, out: CollectedReply) -> Steps[str]:
        """Takes text up to a call's tag as content, without blanks before the tag or a cut-off tag at the end."""
        yield from stream.blanks()
        return (yield from stream.until(present(*self._tags, self.body[0]), out.content, drops_cut=True))

    @property
    def _tags(self) -> tuple[str, ...]:
        """Returns the texts that may follow within a call or end it."""
        return present(*self.all_keys, self.close, self.end, *self.all_begins, self.name[0])

    def _name(self, stream: TextStream) -> Steps[str]:
        """Takes the name and the texts around it. Returns "" if there is none."""
        before, after = self.name
        if not (yield from stream.begins(before)):
            return ""
        stream.take(len(before))
        pieces: list[str] = []
        ends = (after,) if after else (self.key[0], self.end)
        if not (yield from stream.short_until(ends, MAX_NAME_NUM_CHARS, pieces.append)):
            return ""
        stream.take(len(after))
        return self.name_in("".join(pieces))

    # ---- parameters

    def _parameter(self, stream: TextStream, call: _TagCall, marker: str) -> Steps[None]:
        """Reads one parameter. A key without a value is content or, at the reply's end, torn arguments."""
        stream.keep()
        key = yield from self._key(stream, marker)
        if key is None:
            is_over = not (yield from stream.peek())
            stream.put_back()
            before = stream.take(len(marker))
            if is_over:
                yield from stream.until(
                    (), lambda text: call.torn_key(self.cut_key_in(without_cut(text, self.key[1:])))
                )
            else:
                call.out.content(before)
            return
        stream.kept()
        name, said = key
        if name in self.wrappers and call.has_others(name):
            return (yield from self._wrapped(stream, call, name))
        types = self.types_of_value(call.begin_value(name), said)
        if types == TEXT:
            call.out.arguments('"')
            text = TextValue(self.line, call.add_text)
            end = yield from self._value_end(stream, call, text.add)
            if end == "closed" or (end and self.kind is not None):
                text.close()
            call.out.arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from self._value_end(stream, call, pieces.append)
            shown = "".join(pieces)
            call.out.arguments(value_of(shown, types, self.line) if end else shown.strip())

    def _wrapped(self, stream: TextStream, call: _TagCall, name: str) -> Steps[None]:
        """Reads a parameter that may hold all arguments as one object."""
        pieces: list[str] = []
        end = yield from self._value_end(stream, call, pieces.append)
        text = "".join(pieces)
        if not end or not call.add_members(text, lambda key: not call.has_others(key)):
            call.begin_value(name)
            call.out.arguments(value_of(text, frozenset(), self.line) if end else text.strip())

    def _body(self, stream: TextStream, call: _TagCall, marker: str) -> Steps[None]:
        """Reads all arguments as one object. Any other text is content."""
        stream.take(len(marker))
        pieces: list[str] = []
        end = yield from stream.until((self.body[1],), pieces.append)
        stream.take(len(end))
        text = "".join(pieces)
        if text.strip() != "{}" and not call.add_members(text, lambda key: True):
            call.out.content(f"{marker}{text}{end}")

    def _key(self, stream: TextStream, marker: str) -> Steps[tuple[str, str] | None]:
        """Takes a parameter's text up to its value. Returns its key and kind; None if this is not a parameter."""
        stream.take(len(marker))
        pieces: list[str] = []
        if not (yield from stream.short_until(self.key[1], MAX_NAME_NUM_CHARS, pieces.append)):
            if (yield from stream.ends_within(MAX_NAME_NUM_CHARS)):
                yield from stream.until((), ignore)
            return None
        key = self.key_in("".join(pieces))
        if key is None:
            return None
        stream.take(len(self.key[1]))
        if self.value[0]:
            yield from stream.blanks()
            if not (yield from stream.comes_or_is_cut(self.value[0])):
                return None
        return key

    def _value_end(self, stream: TextStream, call: _TagCall, emit: Emit) -> Steps[Literal["closed", "open", ""]]:
        """Takes a value. Returns "closed" after its end marker, "open" if a tag comes instead, "" at the end."""
        closing = self.value[1]
        if self.quote[0] and (yield from stream.begins_after_blanks(self.quote[0])):
            stream.take(len(self.quote[0]))
            if not (yield from stream.until((self.quote[1],), emit)):
                return ""
            stream.take(len(self.quote[1]))
            if (yield from stream.take_after_blanks(closing)):
                return "closed"
        while marker := (yield from stream.until((closing, *self._tags), emit)):
            if marker == closing:
                stream.take(len(closing))
                return "closed"
            stream.keep()
            ends = yield from self._ends_value(stream, marker, call)
            stream.put_back()
            if ends:
                call.out.is_damaged = True  # a guide would let the value continue, so later calls need a known tool
                return "open"
            emit(stream.take(len(marker)))
        return ""

    def _ends_value(self, stream: TextStream, marker: str, call: _TagCall) -> Steps[bool]:
        """Returns whether a tag within a value is markup rather than text: it begins a valid parameter or a call, or
        ends this call.
        """
        if marker in self.all_keys:
            key = yield from self._key(stream, marker)
            return key is not None and call.may_have(key[0])
        if marker in (self.close, self.end):
            stream.take(len(marker))
            yield from self._fillers(stream)
            following = (*self.all_begins, *((self.end, self.name[0]) if marker == self.close else ()))
            for tag in filter(None, following):
                if (yield from stream.begins(tag)):
                    return True
            return not (yield from stream.peek())
        if marker in self.all_begins:
            stream.take(len(marker))
            yield from self._fillers(stream)
        return call.out.has_tool((yield from self._name(stream)))


class _TagCall:
    """The call that is being read."""

    def __init__(self, name: str, out: CollectedReply) -> None:
        self.out = out
        self._schema = out.schema_of(name)
        self._keys: set[str] = set()

    def may_have(self, key: str) -> bool:
        """Returns whether a parameter of this name may follow."""
        return key not in self._keys and not self.has_others(key)

    def has_others(self, key: str) -> bool:
        """Returns whether the schema names parameters, but not this one."""
        known = self._schema.get("properties")
        return isinstance(known, dict) and bool(known) and key not in known

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

    def add_members(self, text: str, is_known: Callable[[str], bool]) -> bool:
        """Writes an object's members as arguments. Returns False for other text and for unknown members."""
        members = members_of(text)
        if not members or not all(is_known(key) and key not in self._keys for key in members):
            return False
        for key, value in members.items():
            self.begin_value(key)
            self.out.arguments(value)
        return True
