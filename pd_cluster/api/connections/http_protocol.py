"""uvicorn's HTTP protocol with limits on a request's head, its trailers and times, and on connections.

uvicorn's parser keeps all its input, however large, and copies it again with every read. Bytes are therefore counted
before they reach the parser. Input is split at the end of a head, so that each head is counted from its start. Requests
that two servers could read differently are refused before any route sees them. Knows nothing of routes except the paths
of probes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pd_cluster.api.connections.connection_limiter import AdmittedConnection, ConnectionLimiter, ConnectionState
from pd_cluster.api.connections.refusals import Refusal, RefusalLog
from pd_cluster.errors import Overloaded, Unavailable
from pd_cluster.service.schema.error_bodies import MAX_BODY_NBYTES, TOO_LARGE

MAX_HEAD_NBYTES = 64 << 10  # request line and headers
MAX_FIELDS = 256
MAX_TRAILERS_NBYTES = 16 << 10
MAX_TRAILERS = 64
MAX_FRAMING_NBYTES = 64 << 10  # sizes and line ends around the chunks of a body, without the body itself
LEAST_NBYTES = 1 << 20  # an upload that sends this many bytes within BODY_TIMEOUT_S gets another BODY_TIMEOUT_S
PIECE_NBYTES = 16 << 10  # size of the pieces in which a chunked body is passed on
MAX_IGNORED_NBYTES = 1 << 20  # the bytes that a client may still send after it was refused
END_OF_HEAD = b"\r\n\r\n"
HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
PROBES = (b"/health", b"/ping", b"/live")


def probes_under(root_path: str) -> frozenset[bytes]:
    """Returns the paths of probes, as clients write them. Probes are answered even if a connection limit is reached."""
    return frozenset(root + path for path in PROBES for root in (b"", root_path.encode()))


class RequestLimits(NamedTuple):
    """`probes`: paths that are always answered. `uploads`: path -> limit in bytes, where bodies may be larger."""

    probes: frozenset[bytes]
    most_fields: int = MAX_FIELDS
    uploads: Mapping[bytes, int] = {}


class Reading(Enum):
    HEAD = "head"
    BODY = "body"
    UNPARSED_BODY = "unparsed body"  # the body of an upgrade request, which the parser skips
    NOTHING = "nothing"  # the request was refused


class GuardedProtocol(HttpToolsProtocol):
    """One connection's protocol. `admitted` is set before the connection is made."""

    __slots__ = (  # saves memory: thousands of connections may be open
        *("_body_left", "_limiter", "_framing_nbytes", "_has_begun", "_head_nbytes", "_held", "_ignored_nbytes"),
        *("_last_bytes", "_limits", "_most_ignored_nbytes", "_num_trailers", "_reading", "_refusals"),
        *("_trailers_nbytes", "_uploaded_nbytes"),
        *("opening", "admitted"),
    )
    admitted: AdmittedConnection

    def __init__(self, limiter: ConnectionLimiter, refusals: RefusalLog, limits: RequestLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limiter = limiter
        self._refusals = refusals
        self._limits = limits
        self.opening: asyncio.Task[None] | None = None  # ends when the connection is made
        self._reading = Reading.HEAD
        self._held = b""  # input after a request that waits for an earlier answer
        self._has_begun = False  # whether at least one byte of a head has arrived
        self._head_nbytes = 0
        self._last_bytes = b""  # the last bytes of an incomplete head, which may be part of its end mark
        self._body_left = 0  # bytes; -1: chunked
        self._framing_nbytes = 0
        self._trailers_nbytes = 0
        self._num_trailers = 0
        self._uploaded_nbytes = -1  # an upload's bytes since its deadline was last extended; -1: not an upload
        self._ignored_nbytes = 0
        self._most_ignored_nbytes = MAX_BODY_NBYTES

    # ---- LimitedConnection, for the limiter

    def evict(self) -> None:
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
        else:
            self.transport.abort()

    def expire(self) -> bool:
        if self._reading is Reading.NOTHING:
            self.transport.abort()
        elif self._is_answering and (self._reading is Reading.HEAD or self.flow.read_paused):
            return False
        elif self._reading is Reading.BODY and self._uploaded_nbytes >= LEAST_NBYTES:
            self._uploaded_nbytes = 0
            return False
        elif self._has_begun:
            self._turn_away(Refusal(408, "the request's headers did not arrive in time", "request_timeout"))
        else:
            self.evict()
        return True

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.admitted.state is ConnectionState.GONE:  # the limiter has evicted it meanwhile
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._held = b""
        self._limiter.left(self.admitted)

    def data_received(self, data: bytes) -> None:
        if self._reading is Reading.NOTHING:
            self._ignored_nbytes += len(data)
            if self._ignored_nbytes > self._most_ignored_nbytes:
                self.transport.abort()
        elif self._held:
            self._held += data  # it was received before reading paused
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Feeds the parser piece by piece until all is parsed, or until a request must wait for the previous answer."""
        at = 0
        try:
            while at < len(data) and not self.transport.is_closing():
                if self.pipeline:
                    self._held = data[at:]
                    return
                at += self._feed(data, at)
            self._watch()
        except httptools.HttpParserError as error:
            why = error.__context__  # the exception raised in the parser's callbacks
            malformed = Refusal(400, f"malformed request: {error}", "malformed_request")
            self._turn_away(why if isinstance(why, Refusal) else malformed)
        except Refusal as refusal:
            self._turn_away(refusal)

    def _watch(self) -> None:
        """Starts the timeout of an incomplete head or body. Most requests arrive whole and need none."""
        if self.transport.is_closing():
            return
        if self._reading is not Reading.HEAD:
            self._limiter.bodies.begin(self.admitted)
        elif self._has_begun:
            self._limiter.heads.begin(self.admitted)

    def _feed(self, data: bytes, at: int) -> int:
        """Parses at least one byte of `data`; returns the number of parsed bytes. Raises Refusal, HttpParserError."""
        if self._reading is Reading.HEAD:
            return self._feed_head(data, at)
        if self._reading is Reading.BODY and self._body_left < 0:
            piece = data[at : at + PIECE_NBYTES]
            self._framing_nbytes += len(piece)
            self.parser.feed_data(piece)
            if self._framing_nbytes > MAX_FRAMING_NBYTES:
                raise Refusal(400, "the body's chunks have too much framing", "malformed_request")
            if self._has_begun:  # the next head begins somewhere in this piece
                self._head_nbytes, self._last_bytes = len(piece), piece[-3:]
            return len(piece)
        piece = data[at : at + self._body_left]
        if not piece:
            raise Refusal(400, "the body does not end where it should", "malformed_request")
        self._body_left -= len(piece)
        if self._reading is Reading.BODY:
            self.parser.feed_data(piece)
        else:
            self.on_body(piece)
            if not self._body_left:
                self._end_message()
        return len(piece)

    def _feed_head(self, data: bytes, at: int) -> int:
        piece = data[at : self._end_of_head(data, at)]
        self._head_nbytes += len(piece)
        if self._head_nbytes > MAX_HEAD_NBYTES:
            raise Refusal(431, f"the request's line and headers are larger than {MAX_HEAD_NBYTES >> 10} KiB")
        last_bytes = self._last_bytes
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # the request is answered without an upgrade
            return len(piece)
        if self._has_begun:
            self._last_bytes = (last_bytes + piece[-3:])[-3:]
        return len(piece)

    def _end_of_head(self, data: bytes, at: int) -> int:
        """Returns the end of the head that continues at `at`, or the end of `data`."""
        if self._last_bytes:
            across = self._last_bytes + data[at : at + 3]
            found = across.find(END_OF_HEAD)
            if found >= 0:
                return at + found + len(END_OF_HEAD) - len(self._last_bytes)
        found = data.find(END_OF_HEAD, at)
        return len(data) if found < 0 else found + len(END_OF_HEAD)

    def _turn_away(self, refusal: Refusal) -> None:
        """Answers, and closes when the client has read the answer; a running response continues."""
        if self._reading is Reading.NOTHING or self.transport.is_closing():
            return
        self._refusals.note(self.admitted.address, str(refusal))
        was_answered = self._reading is not Reading.HEAD
        self._reading = Reading.NOTHING
        if refusal.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # 413: clients may send the body before they read
            self._most_ignored_nbytes = MAX_IGNORED_NBYTES
        self._limiter.heads.end(self.admitted)
        self._limiter.bodies.end(self.admitted)
        self._unset_keepalive_if_required()
        if self._is_answering:
            self.cycle.keep_alive = False
            if not self.cycle.more_body:  # the fault is in the bytes after the request that is being answered
                return
            was_answered = self.cycle.response_started
            self.cycle.disconnected = True  # tells the route that the client left
            self.cycle.message_event.set()
        self._limiter.end_request(self.admitted)
        if not was_answered:
            self.transport.write(refusal.answer())
        self._part()

    def _part(self) -> None:
        """Closes the sending side first: closing on unread input would reset the connection before the client reads."""
        if self.transport.can_write_eof():
            self._limiter.partings.begin(self.admitted)
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._has_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not Reading.HEAD:
            self._ignore_trailer(name, value)
            return
        if len(self.headers) == self._limits.most_fields:
            raise Refusal(431, f"the request has more than {self._limits.most_fields} header fields")
        super().on_header(name, value)

    def _ignore_trailer(self, name: bytes, value: bytes) -> None:
        """Ignores a trailer: no route uses trailers, and they must not count as headers."""
        self._num_trailers += 1
        self._trailers_nbytes += len(name) + len(value)
        if self._num_trailers > MAX_TRAILERS or self._trailers_nbytes > MAX_TRAILERS_NBYTES:
            raise Refusal(431, f"more than {MAX_TRAILERS} trailers or {MAX_TRAILERS_NBYTES >> 10} KiB of them")

    def on_headers_complete(self) -> None:
        self._body_left = self._check_head()
        upgrades = self.parser.should_upgrade()
        if upgrades and (self._body_left < 0 or self.parser.get_method() == b"CONNECT"):
            raise Refusal(400, "this server upgrades no connection", "malformed_request")
        path = self.url.partition(b"?")[0]
        most_nbytes = self._limits.uploads.get(path, -1)
        self._uploaded_nbytes = min(0, most_nbytes)
        if self._body_left > max(most_nbytes, MAX_BODY_NBYTES):
            raise Refusal(413, TOO_LARGE if most_nbytes < 0 else f"the body is larger than {most_nbytes >> 20} MiB")
        is_probe = path in self._limits.probes and self.parser.get_method() in (b"GET", b"HEAD")
        try:
            self._limiter.begin_request(self.admitted, is_probe)
        except (Overloaded, Unavailable) as full:
            status = 429 if isinstance(full, Overloaded) else 503
            raise Refusal(status, str(full), "too_many_connections", full.retry_after_s) from None
        self._limiter.heads.end(self.admitted)
        self._reading = Reading.UNPARSED_BODY if upgrades and self._body_left else Reading.BODY
        self._has_begun = False
        self._head_nbytes = self._framing_nbytes = self._trailers_nbytes = self._num_trailers = 0
        self._ignored_nbytes = 0
        self._last_bytes = b""
        super().on_headers_complete()

    def _check_head(self) -> int:
        """Returns the body's length, -1 for a chunked one.

        Raises Refusal for heads that other servers may read differently.
        """
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        num_hosts, length, encoding = 0, 0, b""
        for name, value in self.headers:
            if name == b"host":
                num_hosts += 1
                if not HOST.fullmatch(value.strip()):
                    raise Refusal(400, "the Host header is invalid", "malformed_request")
            elif name == b"content-length":
                length = int(value)  # the parser has rejected anything but 64-bit numbers
            elif name == b"transfer-encoding":
                encoding = value.strip().lower()
        if num_hosts > 1 or (not num_hosts and version == "1.1"):
            raise Refusal(400, f"{num_hosts} Host headers; a request must have one", "malformed_request")
        if not encoding:
            return length
        if version == "1.0" or encoding != b"chunked":
            raise Refusal(400, "Transfer-Encoding must be chunked, in HTTP/1.1", "malformed_request")
        return -1

    def on_body(self, body: bytes) -> None:
        self._framing_nbytes = 0
        if self._uploaded_nbytes >= 0:
            self._uploaded_nbytes += len(body)
        if self.cycle.response_complete:  # a route has answered without reading it
            self._ignored_nbytes += len(body)
            if self._ignored_nbytes > self._most_ignored_nbytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._reading is Reading.BODY:
            self._end_message()

    def _end_message(self) -> None:
        self._reading = Reading.HEAD
        self._limiter.bodies.end(self.admitted)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._limiter.end_request(self.admitted)
        if self._held and not self.transport.is_closing():
            held, self._held = self._held, b""
            self._take(held)
