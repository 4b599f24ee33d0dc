"""uvicorn's HTTP protocol behind limits: of a request's head, its trailers, its times, and of connections.

The parser behind uvicorn keeps whatever it is fed, however much that is, and copies it again with every read. So bytes
are counted here before it sees them, and a head is cut off where it ends, so that each is counted from its beginning.
What two servers could read differently is refused before a route hears of it. Knows nothing of routes but the paths
of probes.
"""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pd_cluster.api.doorman import Doorman, State, Visit
from pd_cluster.api.refusals import Refusal, RefusalLog
from pd_cluster.errors import Overloaded, Unavailable

MAX_HEAD_NBYTES = 64 << 10  # request line and headers
MAX_FIELDS = 256
MAX_BODY_NBYTES = 32 << 20  # routes refuse larger ones; here it bounds what is sent to one that has answered already
MAX_TRAILERS_NBYTES = 16 << 10
MAX_TRAILERS = 64
MAX_FRAMING_NBYTES = 64 << 10  # of a chunked body, without a byte of the body itself
PIECE_NBYTES = 16 << 10  # of a chunked body at once
MAX_IGNORED_NBYTES = 1 << 20  # what a client may still send once it was turned away
END_OF_HEAD = b"\r\n\r\n"
HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
PROBES = (b"/health", b"/ping", b"/live")


def probes_under(root_path: str) -> frozenset[bytes]:
    """Paths that are answered however many connections there are, as clients write them."""
    return frozenset(root + path for path in PROBES for root in (b"", root_path.encode()))


class Reading(Enum):
    HEAD = "head"
    BODY = "body"
    UNPARSED_BODY = "unparsed body"  # of a request that asked for an upgrade: the parser leaves it out
    NOTHING = "nothing"  # the client was turned away


class GuardedProtocol(HttpToolsProtocol):
    """`visit` is set before the connection is made."""

    __slots__ = (  # thousands of connections are open, and uvicorn's own attributes fill a dict already
        *("_body_left", "_doorman", "_framing_nbytes", "_has_begun", "_head_nbytes", "_held", "_ignored_nbytes"),
        *("_last_bytes", "_num_trailers", "_probes", "_reading", "_refusals", "_trailers_nbytes"),
        *("opening", "visit"),
    )
    visit: Visit

    def __init__(self, doorman: Doorman, refusals: RefusalLog, probes: frozenset[bytes], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._doorman = doorman
        self._refusals = refusals
        self._probes = probes
        self.opening: asyncio.Task[None] | None = None  # ends when the connection is made
        self._reading = Reading.HEAD
        self._held = b""  # what came behind a request that waits for another's answer
        self._has_begun = False  # a head, of which there is at least a byte
        self._head_nbytes = 0
        self._last_bytes = b""  # of an unfinished head, in which its end may begin
        self._body_left = 0  # -1: chunked
        self._framing_nbytes = 0
        self._trailers_nbytes = 0
        self._num_trailers = 0
        self._ignored_nbytes = 0

    # ---- what the doorman asks for

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
        if self.visit.state is State.GONE:  # another came meanwhile
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._held = b""
        self._doorman.left(self.visit)

    def data_received(self, data: bytes) -> None:
        if self._reading is Reading.NOTHING:
            self._ignored_nbytes += len(data)
            if self._ignored_nbytes > MAX_IGNORED_NBYTES:
                self.transport.abort()
        elif self._held:
            self._held += data  # it was on its way when reading was paused
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Feeds the parser piece by piece, until it has all or a second request waits for the first one's answer."""
        at = 0
        try:
            while at < len(data) and not self.transport.is_closing():
                if self.pipeline:
                    self._held = data[at:]
                    return
                at += self._feed(data, at)
            self._watch()
        except httptools.HttpParserError as error:
            why = error.__context__  # of what is raised in the parser's callbacks
            malformed = Refusal(400, f"malformed request: {error}", "malformed_request")
            self._turn_away(why if isinstance(why, Refusal) else malformed)
        except Refusal as refusal:
            self._turn_away(refusal)

    def _watch(self) -> None:
        """What has not come as a whole must come in time; most requests do."""
        if self.transport.is_closing():
            return
        if self._reading is not Reading.HEAD:
            self._doorman.bodies.begin(self.visit)
        elif self._has_begun:
            self._doorman.heads.begin(self.visit)

    def _feed(self, data: bytes, at: int) -> int:
        """Returns how many bytes of `data` were taken, at least one. Raises Refusal and HttpParserError."""
        if self._reading is Reading.HEAD:
            return self._feed_head(data, at)
        if self._reading is Reading.BODY and self._body_left < 0:
            piece = data[at : at + PIECE_NBYTES]
            self._framing_nbytes += len(piece)
            self.parser.feed_data(piece)
            if self._framing_nbytes > MAX_FRAMING_NBYTES:
                raise Refusal(400, "the chunks of the body have too much around them", "malformed_request")
            if self._has_begun:  # the next head, somewhere in this piece
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
        except httptools.HttpParserUpgrade:  # it is answered as if it had not asked for that
            return len(piece)
        if self._has_begun:
            self._last_bytes = (last_bytes + piece[-3:])[-3:]
        return len(piece)

    def _end_of_head(self, data: bytes, at: int) -> int:
        """Where a head that goes on at `at` ends, or the end of `data`."""
        if self._last_bytes:
            across = self._last_bytes + data[at : at + 3]
            found = across.find(END_OF_HEAD)
            if found >= 0:
                return at + found + len(END_OF_HEAD) - len(self._last_bytes)
        found = data.find(END_OF_HEAD, at)
        return len(data) if found < 0 else found + len(END_OF_HEAD)

    def _turn_away(self, refusal: Refusal) -> None:
        """Answers and closes once the client has read it; a stream that is under way to the client goes on."""
        if self._reading is Reading.NOTHING or self.transport.is_closing():
            return
        self._refusals.note(self.visit.address, str(refusal))
        was_answered = self._reading is not Reading.HEAD
        self._reading = Reading.NOTHING
        self._doorman.heads.end(self.visit)
        self._doorman.bodies.end(self.visit)
        self._unset_keepalive_if_required()
        if self._is_answering:
            self.cycle.keep_alive = False
            if not self.cycle.more_body:  # what was wrong came behind the request
                return
            was_answered = self.cycle.response_started
            self.cycle.disconnected = True  # so the route hears that the client left
            self.cycle.message_event.set()
        self._doorman.end_request(self.visit)
        if not was_answered:
            self.transport.write(refusal.answer())
        self._part()

    def _part(self) -> None:
        """A connection that closes on unread bytes is reset, and the client may never see the answer."""
        if self.transport.can_write_eof():
            self._doorman.partings.begin(self.visit)
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    # ---- what the parser found

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._has_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not Reading.HEAD:
            self._ignore_trailer(name, value)
            return
        if len(self.headers) == MAX_FIELDS:
            raise Refusal(431, f"the request has more than {MAX_FIELDS} header fields")
        super().on_header(name, value)

    def _ignore_trailer(self, name: bytes, value: bytes) -> None:
        """Nobody asks for trailers, and they must not pass for headers."""
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
        is_probe = path in self._probes and self.parser.get_method() in (b"GET", b"HEAD")
        try:
            self._doorman.begin_request(self.visit, is_probe)
        except (Overloaded, Unavailable) as full:
            status = 429 if isinstance(full, Overloaded) else 503
            raise Refusal(status, str(full), "too_many_connections", full.retry_after_s) from None
        self._doorman.heads.end(self.visit)
        self._reading = Reading.UNPARSED_BODY if upgrades and self._body_left else Reading.BODY
        self._has_begun = False
        self._head_nbytes = self._framing_nbytes = self._trailers_nbytes = self._num_trailers = 0
        self._ignored_nbytes = 0
        self._last_bytes = b""
        super().on_headers_complete()

    def _check_head(self) -> int:
        """The length of the body, -1 for a chunked one. Raises Refusal for what others may understand otherwise."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(505, "HTTP/1.1 and HTTP/1.0 are spoken here")
        num_hosts, length, encoding = 0, 0, b""
        for name, value in self.headers:
            if name == b"host":
                num_hosts += 1
                if not HOST.fullmatch(value.strip()):
                    raise Refusal(400, "the Host is none", "malformed_request")
            elif name == b"content-length":
                length = int(value)  # the parser has refused what is no number of 64 bits
            elif name == b"transfer-encoding":
                encoding = value.strip().lower()
        if num_hosts > 1 or (not num_hosts and version == "1.1"):
            raise Refusal(400, f"{num_hosts} Host fields; a request has one", "malformed_request")
        if not encoding:
            return length
        if version == "1.0" or encoding != b"chunked":
            raise Refusal(400, "Transfer-Encoding must be chunked, in HTTP/1.1", "malformed_request")
        return -1

    def on_body(self, body: bytes) -> None:
        self._framing_nbytes = 0
        if self.cycle.response_complete:  # a route has answered without it
            self._ignored_nbytes += len(body)
            if self._ignored_nbytes > MAX_BODY_NBYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._reading is Reading.BODY:
            self._end_message()

    def _end_message(self) -> None:
        self._reading = Reading.HEAD
        self._doorman.bodies.end(self.visit)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._doorman.end_request(self.visit)
        if self._held and not self.transport.is_closing():
            held, self._held = self._held, b""
            self._take(held)
