"""Finds the extent of JSON values in a stream as text arrives.

Checks the structure by RFC 8259, but allows any text in strings: models write control characters and unknown escapes,
which do not hide the string's end. Knows nothing of the values' meaning.
"""

from __future__ import annotations

import re

from pd_cluster.parsers.text_stream import BLANK_RUN, Emit, Steps, TextStream

MAX_DEPTH = 256  # nested arrays and objects; deeper text is not a value

_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER_OR_NAME = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}


def scan_value(stream: TextStream, emit: Emit) -> Steps[bool]:
    """Takes one value and the blanks before it, verbatim. Returns False if the text is invalid; the stream is then
    at the fault.
    """
    closers: list[str] = []  # the closing character of each open array and object
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


def begins_object(stream: TextStream) -> Steps[bool]:
    """Returns whether an object comes next, or the beginning of one at the end of the text."""
    if (yield from stream.peek()) != "{":
        return False
    return (yield from stream.peek_past(1)) in ('"', "}", "")


def scan_string(stream: TextStream, emit: Emit) -> Steps[bool]:
    """Takes one string with its quotes, and emits the raw text between them."""
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


def read_string(stream: TextStream) -> Steps[str | None]:
    """Takes a string and the blanks before it. Returns its value; None if there is no string."""
    yield from stream.blanks()
    pieces: list[str] = []
    decoder = StringDecoder(pieces.append)
    if not (yield from scan_string(stream, decoder.feed)):
        return None
    decoder.finish()
    return "".join(pieces)


def take_sign(stream: TextStream, sign: str) -> Steps[bool]:
    """Takes one given character and the blanks before it. Returns False if another character follows."""
    yield from stream.blanks()
    if (yield from stream.peek()) != sign:
        return False
    stream.take(1)
    return True


def _next(stream: TextStream, emit: Emit) -> Steps[str]:
    yield from stream.run(BLANK_RUN, emit)
    return (yield from stream.peek())


def _key(stream: TextStream, emit: Emit) -> Steps[bool]:
    """Takes a member's name and the colon."""
    if (yield from _next(stream, emit)) != '"' or not (yield from _leaf(stream, emit)):
        return False
    if (yield from _next(stream, emit)) != ":":
        return False
    emit(stream.take(1))
    return True


def _leaf(stream: TextStream, emit: Emit) -> Steps[bool]:
    """Takes a string, a number, true, false or null."""
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


_PIECE = re.compile(r"[^\\]+|\\u[0-9a-fA-F]{4}|\\u(?![0-9a-fA-F]{0,3}\Z)|\\[^u]")  # complete escapes only
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class StringDecoder:
    """Decodes the text between a JSON string's quotes.

    Unknown escapes stay as written. Unpaired surrogates, which cannot be encoded, become U+FFFD.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._raw = ""  # an incomplete escape
        self._half = ""  # the first half of a surrogate pair

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
