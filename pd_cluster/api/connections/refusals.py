"""Answers to requests that are rejected before any route, and their rate-limited log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec

PERIOD_S = 10.0

log = logging.getLogger(__name__)


class Refusal(Exception):
    """A rejection, with the answer for the client; the connection closes."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    def answer(self) -> bytes:
        """Returns the whole response, in the format of the API's errors."""
        kind = {429: "rate_limit_error", 503: "service_unavailable"}.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        body = msgspec.json.encode({"error": error})
        retry = "" if self.retry_after_s is None else f"retry-after: {self.retry_after_s}\r\n"
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        return head.encode() + body


class RefusalLog:
    """Logs the first rejection, then a line every `PERIOD_S` at most, with their number and the last reason."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()
        self._num_untold = 0
        self._last = ""

    def note(self, address: str, why: str) -> None:
        """Counts a rejection. `why` contains nothing of the request."""
        self._num_untold += 1
        self._last = f"{address or 'a local socket'}: {why}"
        self.tell()

    def tell(self) -> None:
        """Writes the pending line if it is due."""
        if not self._num_untold or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + PERIOD_S
        others = f" ({self._num_untold} since the last such line)" if self._num_untold > 1 else ""
        log.warning("rejected: %s%s", self._last, others)
        self._num_untold = 0
