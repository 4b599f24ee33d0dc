"""Python calls between markers anywhere in a reply, as LFM2 and OLMo 3 write them.

LFM2 writes a list, OLMo 3 one call in each line. Values mix Python and JSON: models write `null` in a Python list,
sets, numbers with leading zeros, and unescaped quotes or newlines in strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import BLANK, FREE, MAX_CALLS, Node, Tool
from pd_cluster.parsers.irregular_readers import close_calls, read_objects, read_torn
from pd_cluster.parsers.json_scan import take_sign
from pd_cluster.parsers.pythonic import (
    IN_QUOTES,
    PYTHON_KEY,
    PYTHON_NAME,
    PythonValues,
    as_json,
    python_call,
    read_python_call,
)
from pd_cluster.parsers.text_stream import Steps, TextStream

_STRING_OR_ZEROS = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?<![\w.])0+(?=[0-9])""", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}
_UNESCAPED = str.maketrans({"\n": "\\n", "\r": "\\r", "\0": "\\x00"})


@dataclass(frozen=True)
class PythonicSections:
    """Calls between `begin` and `end`: a list in brackets or, with `lines`, one call in each line."""

    begin: str
    end: str
    lines: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    # ---- reading

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        while (yield from stream.until((self.begin,), out.content)):
            stream.keep()
            stream.take(len(self.begin))
            yield from stream.blanks()
            if (yield from stream.begins(self.end)):
                stream.take(len(self.end))
                stream.kept()
                continue
            stream.record()
            is_section = yield from self._read_section(stream, out)
            section = stream.recorded()
            if is_section:
                yield from close_calls(stream, out, self.end, (self.begin,))
                yield from self._take_echo(stream, section)
            else:
                out.content(stream.take(len(self.begin)))

    def _take_echo(self, stream: TextStream, section: str) -> Steps[None]:
        """Drops a section that the model repeats by mistake: the same text and end marker, without a begin marker."""
        echo = f"{section.strip()}{self.end}"
        if (yield from stream.begins_after_blanks(echo)):
            stream.take(len(echo))

    def _read_section(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        """Reads the calls of a section. If the text is not one, puts it back and returns False."""
        if not self.lines and (yield from stream.begins("[{")):  # calls in JSON, which a prompt may ask for
            return (yield from read_objects(stream, out, (self.end, self.begin)))
        if self.lines or (yield from take_sign(stream, "[")):
            if not self.lines and (yield from take_sign(stream, "]")):
                stream.kept()
                return True
            if (yield from self._read_calls(stream, out)):
                return True
        stream.put_back()
        return False

    def _read_calls(self, stream: TextStream, out: CollectedReply) -> Steps[bool]:
        """Reads calls up to other text. Returns whether there are any; if not, the stream keeps the text."""
        num_seen = out.num_seen
        while True:
            num_before = out.num_seen
            if not (yield from read_python_call(stream, out, LOOSE)):
                if out.num_seen > num_before:
                    yield from read_torn(stream, out, (self.end, self.begin))
                    return True
                break
            stream.keep()
            if not self.lines and not (yield from take_sign(stream, ",")):
                break
        if out.num_seen == num_seen:
            return False
        stream.put_back()
        if not self.lines:
            yield from stream.take_after_blanks("]")
        return True

    # ---- guides

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        return ["seq", ["marker", self.begin], *self._section(given, most)]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        section: Node = ["seq", ["until", self.begin], *self._section(given, most or MAX_CALLS)]
        return ["seq", ["repeat", 0, most, section], FREE]

    def _section(self, given: Sequence[Tool], most: int) -> list[Node]:
        one: Node = ["any", *map(python_call, given)]
        comma = r"\n" if self.lines else ", ?"
        inner: list[Node] = [one, *([["repeat", 0, most - 1, ["seq", ["pattern", comma], one]]] if most > 1 else [])]
        brackets = (["text", "["], ["text", "]"])
        return [BLANK, *(inner if self.lines else [brackets[0], *inner, brackets[1]]), ["marker", self.end]]


class LooseValues(PythonValues):
    """Reads values and tolerates models' mistakes: a quote ends a string only if the call can continue after it."""

    def as_json(self, written: str) -> str | None:
        if (shown := as_json(written)) is not None:
            return shown
        try:
            tree = ast.parse(_STRING_OR_ZEROS.sub(lambda found: found[1] or "", written), mode="eval")
            return as_json(ast.unparse(_JsonOnly().visit(tree)))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None

    def _quoted(self, stream: TextStream, pieces: list[str], closers: Sequence[str]) -> Steps[bool]:
        quote = stream.take(1)
        pieces.append(quote)
        while True:
            yield from stream.run(IN_QUOTES[quote], lambda text: pieces.append(text.translate(_UNESCAPED)))
            match (yield from stream.peek()):
                case "\\":
                    pair = yield from stream.take_pair()
                    pieces.append(pair.replace("\\\n", "\\\\\\n"))  # Python would read a line continuation
                case "":
                    return False
                case _:
                    ends = yield from _can_go_on(stream, closers)
                    stream.take(1)
                    pieces.append(quote if ends else f"\\{quote}")
                    if ends:
                        return True


LOOSE = LooseValues()


def _can_go_on(stream: TextStream, closers: Sequence[str]) -> Steps[bool]:
    """Returns whether a value can end after the next quote."""
    stream.keep()
    stream.take(1)
    yield from stream.blanks()
    char = yield from stream.peek()
    if closers:
        ends = char in (",", ":", closers[-1], "")
    elif char == ",":
        stream.take(1)
        yield from stream.blanks()
        name: list[str] = []
        yield from stream.run(PYTHON_KEY, name.append)
        yield from stream.blanks()
        ends = (yield from stream.peek()) in ("=" if name else ")", "")
    elif char == ")":
        stream.take(1)
        ends = yield from _call_can_end(stream)
    else:
        ends = char == ""
    stream.put_back()
    return ends


def _call_can_end(stream: TextStream) -> Steps[bool]:
    """Returns whether a call can end here: the next call or the text after the last call follows."""
    yield from stream.blanks()
    if (yield from stream.peek()) == ",":
        stream.take(1)
        yield from stream.blanks()
    elif (yield from stream.peek()) in ("]", "<", ""):
        return True
    name: list[str] = []
    yield from stream.run(PYTHON_NAME, name.append)
    return (yield from stream.peek()) in ("(" if name else "]", "")


class _JsonOnly(ast.NodeTransformer):
    """Converts values that JSON cannot express."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        return ast.List([self.visit(each) for each in node.elts], ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
