"""JSON values found in a stream, as they come: where each ends, and what is none.

Structure is checked as RFC 8259 says. Inside strings everything goes: control characters and unknown escapes, which
models write, do not make an end less certain. Knows nothing of what the values are for.
"""

from __future__ import annotations

import re

from pd_cluster.parsers.stream import BLANK_RUN, Emit, Steps, Stream

MAX_DEPTH = 256  # of arrays and objects in each other; more is no value

_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER_OR_NAME = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}


def scan_value(stream: Stream, emit: Emit) -> Steps[bool]:
    """Takes one value, and blanks before it, verbatim. False: it is none; the stream stands where that was seen."""
    closers: list[str] = []  # of the arrays and objects that are open
    while True:
        char = yield from _next(stream, emit)
        if char in _CLOSERS:
            if len(closers) == MAX_DEPTH:
                return False
            emit(stream.take(1))
            closers.append(_CLOSERS[char])
            is_empty = (yield from _next(stream, emit)) == closers[-1]
            if not is_empty and char == "{" and not (yield from _key(stream, emit)):
                return False
            if not is_empty:
                continue
        elif not (yield from _leaf(stream, emit)):
            return False
        while closers and (yield from _next(stream, emit)) == closers[-1]:
            emit(stream.take(1))
            closers.pop()
        if not closers:
            return True
        if (yield from stream.peek()) != ",":
            return False
        emit(stream.take(1))
        if closers[-1] == "}" and not (yield from _key(stream, emit)):
            return False


def scan_string(stream: Stream, emit: Emit) -> Steps[bool]:
    """Takes one string with its quotes, and emits what is between them, as it is written."""
    if (yield from stream.peek()) != '"':
        return False
    stream.take(1)
    while True:
        yield from stream.run(_PLAIN, emit)
        match (yield from stream.peek()):
            case '"':
                stream.take(1)
                return True
            case "\\":
                emit((yield from stream.take_pair()))
            case _:
                return False


def read_string(stream: Stream) -> Steps[str | None]:
    """What a string stands for; None where there is none. Blanks before it are taken."""
    yield from stream.blanks()
    pieces: list[str] = []
    decoder = StringDecoder(pieces.append)
    if not (yield from scan_string(stream, decoder.feed)):
        return None
    decoder.finish()
    return "".join(pieces)


def take_sign(stream: Stream, sign: str) -> Steps[bool]:
    """One character, and blanks before it."""
    yield from stream.blanks()
    if (yield from stream.peek()) != sign:
        return False
    stream.take(1)
    return True


def _next(stream: Stream, emit: Emit) -> Steps[str]:
    yield from stream.run(BLANK_RUN, emit)
    return (yield from stream.peek())


def _key(stream: Stream, emit: Emit) -> Steps[bool]:
    """A member's name and the colon."""
    if (yield from _next(stream, emit)) != '"' or not (yield from _leaf(stream, emit)):
        return False
    if (yield from _next(stream, emit)) != ":":
        return False
    emit(stream.take(1))
    return True


def _leaf(stream: Stream, emit: Emit) -> Steps[bool]:
    """A string, a number, true, false or null."""
    if (yield from stream.peek()) == '"':
        emit('"')
        if not (yield from scan_string(stream, emit)):
            return False
        emit('"')
        return True
    pieces: list[str] = []

    def add(text: str) -> None:
        pieces.append(text)
        emit(text)

    yield from stream.run(_SCALAR, add)
    return _NUMBER_OR_NAME.fullmatch("".join(pieces)) is not None


_PIECE = re.compile(r"[^\\]+|\\u[0-9a-fA-F]{4}|\\u(?![0-9a-fA-F]{0,3}\Z)|\\[^u]")  # else an escape that is cut short
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class StringDecoder:
    """What is between a JSON string's quotes, turned into what it stands for.

    Unknown escapes stand for themselves; halves of surrogate pairs, which no encoding takes, for U+FFFD.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._raw = ""  # an escape that is not complete
        self._half = ""  # the first half of a pair

    def feed(self, raw: str) -> None:
        text, at, pieces = self._raw + raw, 0, [self._half]
        while piece := _PIECE.match(text, at):
            pieces.append(_meaning(piece[0]))
            at = piece.end()
        self._raw = text[at:]
        self._half = pieces[-1] if "\ud800" <= pieces[-1] <= "\udbff" and len(pieces[-1]) == 1 else ""
        self._show("".join(pieces)[: -1 if self._half else None])

    def finish(self) -> None:
        self._show(self._half + self._raw)
        self._half = self._raw = ""

    def _show(self, text: str) -> None:
        if _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if text:
            self._emit(text)


def _meaning(piece: str) -> str:
    if not piece.startswith("\\"):
        return piece
    if len(piece) == 6:
        return chr(int(piece[2:], 16))
    return _ESCAPES.get(piece[1], piece)
