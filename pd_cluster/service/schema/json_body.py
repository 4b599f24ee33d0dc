"""Decodes JSON bodies, with limits on how many values they have, so that no body blocks the interpreter for long.

Decoding holds the interpreter's lock throughout, and takes a time that depends on the number of values, not of bytes.
So values are counted first, in chunks; other threads may run in between. Knows nothing of requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pd_cluster.errors import RequestError

MAX_CONTAINERS = 50_000  # arrays and objects
MAX_NAMES = 32_768  # names in objects, each of which is allocated and hashed
MAX_STRINGS = 100_000  # including names
MAX_VALUES = 1_050_000  # enough for 2**20 token ids, and all other fields
MAX_ESCAPES = 1_500_000  # backslashes in strings; enough for a text of that many escaped characters
MAX_DEPTH = 64  # nesting of arrays and objects
CHUNK_NBYTES = 256 << 10  # counting a chunk takes about a millisecond
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[{]},:'))
_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")


def decoded(body: bytes) -> Any:
    """Decodes a JSON body that is neither too large nor too deep. Raises RequestError."""
    brackets = structure(body)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"the body is nested more than {MAX_DEPTH} deep") from None
    for _ in range(MAX_DEPTH):
        if not brackets:
            return data
        brackets = brackets.replace(b"[]", b"")  # removes the innermost pairs
    if brackets:
        raise RequestError(f"the body is nested more than {MAX_DEPTH} deep")
    return data


def structure(body: bytes) -> bytes:
    """Returns all brackets and braces outside of strings, the braces as brackets, without decoding the body.

    Raises RequestError if a count exceeds its limit.
    """
    num_quotes = num_escapes = num_commas = num_names = num_brackets = 0
    found: list[bytes] = []
    start = 0
    while start < len(body):
        stop = _stop_of_chunk(body, start)
        chunk = body[start:stop]
        start = stop
        if b"\\" in chunk:
            num_escapes += chunk.count(b"\\")
            _check_most(num_escapes, MAX_ESCAPES, "backslashes")
            chunk = chunk.replace(rb"\\", b"").replace(rb"\"", b"")
        marks = chunk.translate(None, _NOT_STRUCTURE)
        is_in_string = num_quotes % 2
        num_quotes += marks.count(b'"')
        _check_most(num_quotes // 2, MAX_STRINGS, "strings")
        outside = b"".join(marks.replace(b'""', b"").split(b'"')[is_in_string::2])
        num_commas += outside.count(b",")
        _check_most(num_commas + 1, MAX_VALUES, "values")
        num_names += outside.count(b":")
        _check_most(num_names, MAX_NAMES, "names in objects")
        brackets = outside.translate(_AS_BRACKETS, b",:")
        num_brackets += brackets.count(b"[")
        _check_most(num_brackets, MAX_CONTAINERS, "arrays and objects")
        found.append(brackets)
    return b"".join(found)


def _stop_of_chunk(body: bytes, start: int) -> int:
    """Returns the end of a chunk, which is never between a backslash and the character that it escapes."""
    stop = start + CHUNK_NBYTES
    if stop >= len(body) or body[stop - 1] != ord("\\"):
        return stop
    end = body[start:stop]
    return stop + (len(end) - len(end.rstrip(b"\\"))) % 2


def _check_most(number: int, most: int, what: str) -> None:
    if number > most:
        raise RequestError(f"the body has {number} {what}; at most {most} are allowed")
