"""Formats that need code instead of a description: Llama 3's bare JSON, Mistral's and dots' two forms, a bare array."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pd_cluster.parsers import irregular_readers
from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import BLANK, FREE, MAX_CALLS, Node, Tool, array_schema, call_schema, object_of
from pd_cluster.parsers.text_stream import Steps, TextStream
from pd_cluster.parsers.xml_markup import XmlCalls

_NO_OBJECT: Node = ["pattern", r"[ \t\r\n]*([^ \t\r\n{<]|<[^|])"]  # the beginning of a reply that starts with text


class Llama3Calls:
    """One or more `{"name": …, "parameters": …}`."""

    markers: tuple[str, ...] = (irregular_readers.PYTHON_TAG,)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        return irregular_readers.read_llama3(stream, out)

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        call: Node = ["json", call_schema(given, "parameters")]
        more: Node = ["repeat", 0, most - 1, ["seq", ["pattern", r";[ \n]?|\n"], call]]
        tag: Node = ["repeat", 0, 1, ["marker", irregular_readers.PYTHON_TAG]]
        return ["seq", tag, call, more] if most > 1 else ["seq", tag, call]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        named: list[Node] = [
            ["seq", ["pattern", rf' ?"{re.escape(tool.name)}", ?"parameters": ?'], ["json", object_of(tool)]]
            for tool in given
        ]
        called: Node = ["seq", ["until", irregular_readers.NAME_IN_TEXT], ["any", *named], ["text", "}"]]
        tagged: Node = ["seq", ["until", irregular_readers.PYTHON_TAG], ["json", call_schema(given, "parameters")]]
        within: Node = ["seq", _NO_OBJECT, ["repeat", 0, most, ["any", called, tagged]], FREE]
        return ["any", self.calls(given, most or MAX_CALLS), within, ["pattern", r"[ \t\r\n]*<?"]]


class MistralCalls:
    """`[TOOL_CALLS]` and an array of calls or, from newer models, one call's name and arguments."""

    markers: tuple[str, ...] = (irregular_readers.TOOL_CALLS, irregular_readers.CALL_ID, irregular_readers.ARGS)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        return irregular_readers.read_mistral(stream, out)

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        one: Node = ["seq", ["marker", irregular_readers.TOOL_CALLS], ["any", *self._named(given)]]
        return [
            "any",
            ["seq", ["marker", irregular_readers.TOOL_CALLS], *self._array(given, most)],
            ["repeat", 1, most, one],
        ]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        array: Node = ["seq", *self._array(given, most or MAX_CALLS)]
        call: Node = ["seq", ["until", irregular_readers.TOOL_CALLS], ["any", array, *self._named(given)]]
        return ["seq", ["repeat", 0, most, call], FREE]

    def _array(self, given: Sequence[Tool], most: int) -> list[Node]:
        return [BLANK, ["json", array_schema(given, "arguments", most)]]

    def _named(self, given: Sequence[Tool]) -> list[Node]:
        args: Node = ["repeat", 0, 1, ["marker", irregular_readers.ARGS]]
        return [["seq", ["text", tool.name], args, ["json", object_of(tool)]] for tool in given]


class DotsCalls(XmlCalls):
    """Calls as parameters between tags, or as a JSON object between the same markers."""

    def _read_one(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        if (yield from stream.peek()) == "{":
            return (yield from irregular_readers.read_objects(stream, out, (self.end, self.begin)))
        return (yield from super()._read_one(stream, out))


class ArrayCalls:
    """`[{"name": …, "parameters": …}, …]`, which guides require of models that have no markup of their own."""

    markers: tuple[str, ...] = ()

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        return irregular_readers.read_array(stream, out)

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        return ["json", array_schema(given, "parameters", most)]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        return FREE
