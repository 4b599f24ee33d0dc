"""Decodes JSON bodies, with limits on how many values they have, so that no body blocks the interpreter for long.

Decoding holds the interpreter's lock throughout, and takes a time that depends on the number of values, not of bytes.
So values are counted first, in chunks; other threads may run in between. Long runs of numbers, such as a prompt's token
ids, are decoded in chunks, too. Knows nothing of requests.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

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
_PLACEHOLDER = secrets.token_hex(16)  # stands for a run of numbers; no client can know it


class Structure(NamedTuple):
    """`brackets`: all brackets and braces outside of strings, the braces as brackets. `runs`: the begin and end of
    each chunk of the body whose values have only commas between them.
    """

    brackets: bytes
    runs: list[tuple[int, int]]


def decoded(body: bytes) -> Any:
    """Decodes a JSON body that is neither too large nor too deep. Raises RequestError."""
    brackets, runs = structure(body)
    try:
        data = _decoded_in_chunks(body, runs) if runs else msgspec.json.decode(body)
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


def _decoded_in_chunks(body: bytes, runs: list[tuple[int, int]]) -> Any:
    """Decodes runs of values by themselves. Raises what decoding the whole raises."""
    kept, chunks, end = list[bytes](), dict[str, list[Any]](), 0
    try:
        for start, stop in runs:
            first, last = body.find(b",", start, stop), body.rfind(b",", start, stop)
            placeholder = f"{_PLACEHOLDER}{start}"
            chunks[placeholder] = msgspec.json.decode(b"[%b]" % body[first + 1 : last])
            kept += body[end : first + 1], msgspec.json.encode(placeholder)
            end = last
        data = msgspec.json.decode(b"".join([*kept, body[end:]]))
    except msgspec.DecodeError:
        return msgspec.json.decode(body)  # its error names the place in the body
    return _joined(data, chunks)


def _joined(value: Any, chunks: dict[str, list[Any]]) -> Any:
    """Returns a decoded value with its chunks in the place of their placeholders."""
    if isinstance(value, dict):
        for name, each in value.items():
            value[name] = _joined(each, chunks)
        return value
    if not isinstance(value, list):
        return value
    whole, end = list[Any](), 0
    for at, each in enumerate(value):
        if isinstance(each, dict | list):
            value[at] = _joined(each, chunks)
        elif isinstance(each, str) and each in chunks:
            whole += value[end:at]
            whole += chunks.pop(each)
            end = at + 1
    if not end:
        return value
    whole += value[end:]
    return whole


def structure(body: bytes) -> Structure:
    """Finds the brackets, without decoding the body. Raises RequestError if a count exceeds its limit."""
    num_quotes = num_escapes = num_commas = num_names = num_brackets = 0
    found, runs = list[bytes](), list[tuple[int, int]]()
    start = 0
    while start < len(body):
        stop = _stop_of_chunk(body, start)
        chunk = body[start:stop]
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
        if not is_in_string and len(marks) == outside.count(b",") > 1:
            runs.append((start, stop))
        start = stop
        _check_most(num_commas + 1, MAX_VALUES, "values")
        num_names += outside.count(b":")
        _check_most(num_names, MAX_NAMES, "names in objects")
        brackets = outside.translate(_AS_BRACKETS, b",:")
        num_brackets += brackets.count(b"[")
        _check_most(num_brackets, MAX_CONTAINERS, "arrays and objects")
        found.append(brackets)
    return Structure(b"".join(found), runs)


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
