"""Reads and writes the lines of a batch, and finds the requests that are already answered.

The format is OpenAI's batch format, one JSON object per line. Keeps only 16 bytes per input line in memory (about 100
as a Python object). Knows nothing of engines or of an answer's contents.
"""

from __future__ import annotations

import errno
import hashlib
import os
import reprlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from pd_cluster.errors import ConfigError, PdClusterError, RequestError
from pd_cluster.service.schema.error_bodies import MAX_BODY_NBYTES, BodyTooLarge, error_body_at, status_of

MAX_LINE_NBYTES = MAX_BODY_NBYTES + (64 << 10)  # a body and its envelope
MAX_ID_NUM_CHARS = 1024
ID_PREFIX = "batch_req_"
FIRST_BYTES = b'{"id":"' + ID_PREFIX.encode()  # the beginning of every output line
NOT_ON_DISK = (errno.EINVAL, errno.EROFS, errno.ENOTSUP)  # errors of fsync for pipes and the like
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class WrongMethod(RequestError):
    status = 405


class OutputFailed(PdClusterError):
    """The disk is full, or the pipe has no reader."""


class BatchEntry(NamedTuple):
    """A line of the input. An invalid request has an `error`; a request without a custom_id is identified by its
    number.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: RequestError | None = None

    @property
    def key(self) -> bytes:
        """A key of this request, independent of the rest of the file."""
        return key_of(self.custom_id, self.number)


class BatchPlan(NamedTuple):
    num_lines: int
    num_left: int  # requests without an answer


class Answered(NamedTuple):
    """The existing contents of an output. `nbytes`: the size of its complete lines; an incomplete line may follow."""

    keys: set[bytes]
    nbytes: int


def key_of(custom_id: str | None, number: int | None) -> bytes:
    named = f"id {custom_id}" if custom_id is not None else f"line {number}"
    return hashlib.blake2b(named.encode(), digest_size=16).digest()


# ---- input


def entries_of(file: BinaryIO) -> Iterator[BatchEntry]:
    """Yields the entries from the beginning of the file, without blank lines."""
    file.seek(0)
    for number, line in enumerate(_lines_of(file), 1):
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield entry_of(number, text)


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines. A line that is too long is cut, but stays long enough to be recognized as too long."""
    while line := file.readline(MAX_LINE_NBYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_NBYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_NBYTES + 1)
        yield line


def entry_of(number: int, text: bytes) -> BatchEntry:
    """Parses a line. Never raises."""
    custom_id = None
    try:
        if len(text) > MAX_LINE_NBYTES:
            raise BodyTooLarge(f"the line is longer than {MAX_LINE_NBYTES} bytes")
        fields = _fields_of(text)
        custom_id = _custom_id(fields)
        method, url = _text(fields, "method"), _text(fields, "url")
        if method != "POST":
            raise WrongMethod(f"method: {reprlib.repr(method)}; expected POST", "method", "method_not_supported")
        if "body" not in fields:
            raise RequestError("body: missing; give the request that would be sent to the url", param="body")
        return BatchEntry(number, custom_id, url, bytes(fields["body"]))
    except RequestError as error:
        return BatchEntry(number, custom_id, error=error)


def _fields_of(text: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise RequestError("the line must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the line is not JSON: {error}") from None
    except RecursionError:
        raise RequestError("the line is nested too deep") from None


def _custom_id(fields: dict[str, msgspec.Raw]) -> str:
    custom_id = _text(fields, "custom_id")
    if not 0 < len(custom_id) <= MAX_ID_NUM_CHARS:
        raise RequestError(
            f"custom_id: {len(custom_id)} characters; expected 1 to {MAX_ID_NUM_CHARS}", param="custom_id"
        )
    return custom_id


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    if name not in fields:
        raise RequestError(f"{name}: missing", param=name)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = bytes(fields[name])[:40].decode(errors="replace")
        raise RequestError(f"{name}: {shown}: must be a string", param=name) from None


def plan(entries: Callable[[], Iterator[BatchEntry]], answered: set[bytes], name: str) -> BatchPlan:
    """Reads the whole input once. Raises ConfigError if two lines have the same custom_id."""
    seen: set[bytes] = set()
    num_left = 0
    for entry in entries():
        if entry.key in seen:
            first = next(each.number for each in entries() if each.custom_id == entry.custom_id)
            raise ConfigError(
                f"{name}: lines {first} and {entry.number} have the same custom_id, {reprlib.repr(entry.custom_id)}; "
                f"give each line a different one"
            )
        seen.add(entry.key)
        num_left += entry.key not in answered
    return BatchPlan(len(seen), num_left)


# ---- output


class _Line(msgspec.Struct):
    """The needed fields of an existing line."""

    custom_id: str | None
    response: msgspec.Raw
    error: msgspec.Raw = msgspec.Raw(b"null")


class _ErrorOfLine(msgspec.Struct):
    line: int


def line_of(entry: BatchEntry, status: int, body: bytes) -> bytes:
    """Returns an answer's line. `body`: JSON of an answer or of an error; an error is written into both fields of the
    line.
    """
    error: dict[str, Any] | None = None
    if status != 200:
        error = msgspec.json.decode(body)["error"]
        if entry.custom_id is None:
            error["line"] = entry.number
    line = {
        "id": ID_PREFIX + secrets.token_hex(12),
        "custom_id": entry.custom_id,
        "response": {"status_code": status, "request_id": secrets.token_hex(16), "body": msgspec.Raw(body)},
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


def error_of(entry: BatchEntry, error: Exception) -> bytes:
    """Returns the line of a failed request, with the error in the format of its url."""
    return line_of(entry, status_of(error), msgspec.json.encode(error_body_at(entry.url, error)))


def unanswered_line(entry: BatchEntry, code: str, message: str) -> bytes:
    """Returns the line of a request that was never tried, as OpenAI writes it."""
    error = {"code": code, "message": message}
    line = {"id": ID_PREFIX + secrets.token_hex(12), "custom_id": entry.custom_id, "response": None, "error": error}
    return msgspec.json.encode(line) + b"\n"


def answered_in(file: BinaryIO, name: str) -> Answered:
    """Reads an existing output. Raises ConfigError for any other file, so that it is not truncated."""
    keys: set[bytes] = set()
    nbytes = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):  # the last line, incomplete
            if line[: len(FIRST_BYTES)] != FIRST_BYTES[: len(line)]:
                raise _not_a_batch(name, number)
            break
        try:
            keys.add(_key_of_line(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _not_a_batch(name, number) from None
        nbytes += len(line)
    return Answered(keys, nbytes)


def _key_of_line(line: bytes) -> bytes:
    found = msgspec.json.decode(line, type=_Line)
    if found.custom_id is not None:
        return key_of(found.custom_id, None)
    return key_of(None, msgspec.json.decode(found.error, type=_ErrorOfLine).line)


def _not_a_batch(name: str, number: int) -> ConfigError:
    return ConfigError(f"{name}: line {number} is not an answer of a batch; give another file, or move this one away")


class Output:
    """Appends whole answers: a killed process leaves at most the last line incomplete.

    `fd`: a descriptor of a file or of the standard output, which the caller still owns.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_synced = True
        self._failed: OutputFailed | None = None

    def write(self, line: bytes) -> None:
        """Writes a line. Raises OutputFailed."""
        self._check()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise OutputFailed(f"the output cannot be written: {error.strerror}") from None
        self._is_synced = False

    def sync(self) -> None:
        """Syncs everything written so far to the disk, so that it survives a power cut. Raises OutputFailed."""
        self._check()
        if self._is_synced:
            return
        self._is_synced = True  # before the sync, because another thread may write during it
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in NOT_ON_DISK:
                self._failed = OutputFailed(f"the output did not reach the disk: {error.strerror}")
        self._check()

    def _check(self) -> None:
        """Raises an earlier failure again: the system reports it only once, but the data is lost."""
        if self._failed is not None:
            raise self._failed
