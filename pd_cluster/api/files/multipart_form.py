"""Reads a multipart body as it arrives: one file and a few short fields. Needs the extra `files`."""

from __future__ import annotations

import re

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from pd_cluster.errors import RequestError

FORM = b"multipart/form-data"
MAX_PARTS, MAX_FIELD_NBYTES = 8, 1 << 10
MAX_HEADERS, MAX_HEADER_NBYTES = 8, 4 << 10
MAX_NAME_NUM_CHARS = 255
DEFAULT_NAME = "upload.jsonl"
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


class MultipartForm:
    """`feed` and `end` raise RequestError. `fields` and `filename` are complete after `end`."""

    def __init__(self, content_type: str) -> None:
        """Raises RequestError for a body of another type."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != FORM or not boundary:
            raise RequestError("Content-Type: expected multipart/form-data with a boundary, and the file in `file`")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_NBYTES,
        )
        self._num_parts, self._is_complete, self._has_file = 0, False, False
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._field: str | None = None  # the current part's field; None: the file
        self._text = bytearray()
        self._out = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Parses the next bytes of the body, and returns those that belong to the file."""
        self._out = bytearray()
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise RequestError(f"the form cannot be read: {str(error)[:200]}") from None
        return bytes(self._out)

    def end(self) -> None:
        """Checks that the form is whole."""
        if not self._is_complete:
            raise RequestError("the form does not end where it should")
        if not self._has_file:
            raise RequestError("file: missing; send the file as a part of this name", param="file")

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError(f"the form has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name != "file":
            self._field, self._text = name, bytearray()
            return
        if self._has_file:
            raise RequestError("file: given twice; upload one file at a time", param="file")
        self._field, self._has_file = None, True
        self.filename = shown_name(options.get(b"filename", b""))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._out += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_NBYTES:
            raise RequestError(f"{self._field[:40]}: more than {MAX_FIELD_NBYTES} bytes", param=self._field[:40])

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._text.decode(errors="replace")

    def _end(self) -> None:
        self._is_complete = True


def shown_name(given: bytes) -> str:
    """Returns a client's file name as one line, without folders."""
    name = UNPRINTABLE.sub("", given.decode(errors="replace")).replace("\\", "/").rpartition("/")[2]
    return name[-MAX_NAME_NUM_CHARS:] or DEFAULT_NAME
