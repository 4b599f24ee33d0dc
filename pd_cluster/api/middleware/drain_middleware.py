"""Drains a server: running requests finish, new requests get 503, and the port stays open meanwhile.

Knows nothing of signals or sockets: `begin` is called at the first signal, `finish` returns when the listener may
close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.api.middleware.error_responses import error_response
from pd_cluster.errors import Unavailable
from pd_cluster.service.schema.error_bodies import MAX_BODY_NBYTES

LAST_WORDS_S = 2.0  # the time to send in-band errors after running requests have been ended
REFUSED_BODY_S = 1.0
ALWAYS_ANSWERED = ("/health", "/ping", "/live", "/metrics", "/load")


class Drain:
    """Counts running requests until the last one ends. `end_running` must end all of them, with an in-band error if
    possible.

    A drain that `stays` refuses new requests until `hurry`, even when idle, because sibling servers may still have
    requests.
    """

    def __init__(self, timeout_s: float, end_running: Callable[[], None], stays: bool = False) -> None:
        self.is_draining = False
        self._stays = stays
        self._timeout_s = timeout_s
        self._end_running = end_running
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.is_draining = True

    async def finish(self, hurry: asyncio.Event) -> None:
        """Waits until no request runs. After the timeout or on `hurry`, ends running requests."""
        idle, hurried = asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(hurry.wait())
        enough = {hurried} if self._stays else {idle, hurried}
        try:
            await asyncio.wait(enough, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._num_running:
                self._end_running()
                await asyncio.wait({idle}, timeout=LAST_WORDS_S)
        finally:
            idle.cancel()
            hurried.cancel()

    @property
    def is_idle(self) -> bool:
        return self.is_draining and not self._num_running

    @property
    def num_running(self) -> int:
        """The number of requests whose last byte has not been sent."""
        return self._num_running

    def started(self) -> None:
        self._num_running += 1
        self._idle.clear()

    def ended(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()


class DrainMiddleware:
    """Wraps all routes of an app: counts requests from first byte to last, and refuses new ones while draining."""

    def __init__(self, app: ASGIApp, drain: Drain, root_path: str = "") -> None:
        self._app = app
        self._drain = drain
        self._always_answered = {root_path + path for path in ALWAYS_ANSWERED}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._always_answered:
            await self._app(scope, receive, send)
        elif self._drain.is_draining:
            await _refuse(scope, receive, send)
        else:
            self._drain.started()
            try:
                await self._app(scope, receive, send)
            finally:
                self._drain.ended()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuses the request and closes the connection, so that the client's next request goes to another server."""
    await _skip_body(receive)
    response = error_response(Unavailable("this server is stopping and takes no new requests"), scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


async def _skip_body(receive: Receive) -> None:
    """Reads the body: closing with unread input would reset the connection before the client reads the answer."""
    nbytes = 0
    try:
        async with asyncio.timeout(REFUSED_BODY_S):
            while nbytes < MAX_BODY_NBYTES:
                message: Message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                nbytes += len(message["body"])
    except TimeoutError:
        return
