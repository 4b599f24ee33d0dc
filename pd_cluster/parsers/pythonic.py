"""Calls as a Python list, `[f(city="Bonn", days=2), g()]`, that makes up the whole reply.

Values are Python literals or JSON; clients receive JSON, one argument at a time. Guides require JSON values. Text that
only looks like a list of calls is passed on as content.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import MAX_CALLS, Node, Tool
from pd_cluster.parsers.irregular_readers import read_torn
from pd_cluster.parsers.json_scan import take_sign
from pd_cluster.parsers.text_stream import Steps, TextStream
from pd_cluster.parsers.tool_schema import listed, must_be_plain, schema_of

MAX_DEPTH = 64  # nested brackets in one value
BRACKETS = {"(": ")", "[": "]", "{": "}"}

PYTHON_NAME = re.compile(r"[\w.-]*")
PYTHON_KEY = re.compile(r"\w*")
_PLAIN = re.compile(r"[^\"'()\[\]{},]*")
IN_QUOTES = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_COMMA: Node = ["pattern", ", ?"]
_ANY_VALUE: Node = ["any", ["json", {}], ["pattern", r"'([^'\\\n]|\\.)*'|True|False|None"]]


@dataclass(frozen=True)
class PythonicCalls:
    """`begin` and `end`: optional texts around the list."""

    begin: str = ""
    end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.begin, self.end) if text)

    # ---- reading

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        stream.keep()
        yield from stream.blanks()
        is_marked = self.begin != "" and (yield from stream.begins(self.begin))
        if is_marked:
            stream.take(len(self.begin))
        is_open = yield from take_sign(stream, "[")
        if is_marked and is_open and (yield from take_sign(stream, "]")):
            stream.kept()  # an empty list
        else:
            yield from self._read_list(stream, out, is_open)
        if self.end and out.num_seen + is_marked and (yield from stream.begins_after_blanks(self.end)):
            stream.take(len(self.end))
        yield from stream.until((), out.content)

    def _read_list(self, stream: TextStream, out: CollectedReply, is_open: bool) -> Steps[None]:
        """Reads the calls after a list's opening bracket, if any."""
        while is_open:
            num_seen = out.num_seen
            if not (yield from read_python_call(stream, out)):
                if out.num_seen > num_seen:
                    yield from read_torn(stream, out, (self.end,) if self.end else ())
                break
            stream.keep()
            is_open = yield from take_sign(stream, ",")
        if out.num_seen and not is_open and (yield from take_sign(stream, "]")):
            stream.kept()
        elif left := stream.kept():
            out.content(left)

    # ---- guides

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        one: Node = ["any", *map(python_call, given)]
        more: list[Node] = [["repeat", 0, most - 1, ["seq", _COMMA, one]]] if most > 1 else []
        begin, end = ([["repeat", 0, 1, ["marker", mark]]] if mark else [] for mark in (self.begin, self.end))
        return ["seq", *begin, ["text", "["], one, *more, ["text", "]"], *end]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        first = r"[^ \t\r\n\[<](.|\n)*|<([^|](.|\n)*)?" if self.begin else r"[^ \t\r\n\[](.|\n)*"
        return ["any", self.calls(given, most or MAX_CALLS), ["pattern", rf"[ \t\r\n]*({first})?"]]


def python_call(tool: Tool) -> Node:
    """Returns the node of one call. Raises RequestError."""
    if not tool.parameters:  # any arguments are valid
        one: Node = ["seq", ["pattern", r"[A-Za-z_][A-Za-z0-9_]{0,63}"], ["text", "="], _ANY_VALUE]
        given: Node = ["repeat", 0, 1, ["seq", one, ["repeat", 0, None, ["seq", _COMMA, one]]]]
        return ["seq", ["text", f"{tool.name}("], given, ["text", ")"]]
    must_be_plain(tool)
    properties = tool.parameters.get("properties", {})
    required = list(dict.fromkeys(tool.parameters.get("required", [])))
    by_name: dict[str, Node] = {
        name: ["seq", ["text", f"{name}="], ["json", schema_of(tool, properties.get(name, True))]]
        for name in dict.fromkeys((*required, *properties))
    }
    needed = [by_name[name] for name in required]
    others = [node for name, node in by_name.items() if name not in required]
    return ["seq", ["text", f"{tool.name}("], *listed(needed, others, _COMMA), ["text", ")"]]


# ---- one call


class PythonValues:
    """Reads values and converts them to JSON."""

    def read(self, stream: TextStream, pieces: list[str]) -> Steps[bool]:
        """Takes the text of a value up to the comma or bracket after it. Returns whether one follows."""
        closers: list[str] = []
        while True:
            yield from stream.run(_PLAIN, pieces.append)
            char = yield from stream.peek()
            if not char or len(closers) > MAX_DEPTH:
                return False
            if not closers and char in ",)":
                return True
            if char in IN_QUOTES:
                if not (yield from self._quoted(stream, pieces, closers)):
                    return False
                continue
            if char in BRACKETS:
                closers.append(BRACKETS[char])
            elif char != "," and (not closers or char != closers.pop()):
                return False
            pieces.append(stream.take(1))

    def as_json(self, written: str) -> str | None:
        return as_json(written)

    def _quoted(self, stream: TextStream, pieces: list[str], closers: Sequence[str]) -> Steps[bool]:
        """Takes a string with its quotes. `closers`: the closing brackets of the brackets around it."""
        quote = stream.take(1)
        pieces.append(quote)
        while True:
            yield from stream.run(IN_QUOTES[quote], pieces.append)
            match (yield from stream.peek()):
                case "\\":
                    pieces.append((yield from stream.take_pair()))
                case "":
                    return False
                case _:
                    pieces.append(stream.take(1))
                    return True


STRICT = PythonValues()


def read_python_call(stream: TextStream, out: CollectedReply, values: PythonValues = STRICT) -> Steps[bool]:
    """Reads `name(key=value, …)`. Returns whether it is complete; an incomplete one has begun unless the stream still
    keeps text.
    """
    yield from stream.blanks()
    name: list[str] = []
    yield from stream.run(PYTHON_NAME, name.append)
    if not name or not (yield from take_sign(stream, "(")):
        return False
    key = yield from _key(stream)
    if key is None or (not key and not (yield from take_sign(stream, ")"))):
        return False
    stream.kept()
    out.begin("".join(name))
    out.arguments("{" if key else "{}")
    comma = ""
    while key:
        out.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        pieces: list[str] = []
        is_whole = yield from values.read(stream, pieces)
        written = "".join(pieces).strip()
        shown = values.as_json(written) if is_whole else None
        out.arguments(written if shown is None else shown)
        if shown is None:
            return False
        comma = ", "
        stream.keep()
        key = (yield from _key(stream)) if (yield from take_sign(stream, ",")) else ""
        if key is None or (not key and not (yield from take_sign(stream, ")"))):
            out.arguments(stream.kept())
            return False
        stream.kept()
        out.arguments("" if key else "}")
    return True


def _key(stream: TextStream) -> Steps[str | None]:
    """Takes `key=` and the blanks before it. Returns "" if no name follows, None for a name without `=`."""
    yield from stream.blanks()
    pieces: list[str] = []
    yield from stream.run(PYTHON_KEY, pieces.append)
    return "".join(pieces) if not pieces or (yield from take_sign(stream, "=")) else None


def as_json(written: str) -> str | None:
    """Returns a value's JSON text; None if it is neither JSON nor a Python literal that JSON can express."""
    try:
        json.loads(written, parse_constant=_no_constant)
        return written
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            text = json.dumps(ast.literal_eval(written), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return encodable(text)


def encodable(text: str) -> str:
    """Returns the text with U+FFFD for unpaired surrogates, which cannot be encoded."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _no_constant(name: str) -> None:
    raise ValueError(name)
