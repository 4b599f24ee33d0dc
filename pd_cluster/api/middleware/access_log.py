"""Logs one line for each request at the public port, if enabled.

Lines have uvicorn's form: address, method, path, version, status. They do not show queries.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST

log = logging.getLogger(__name__)

PHRASES = {each.value: each.phrase for each in HTTPStatus} | {CLIENT_CLOSED_REQUEST: "Client Closed Request"}


class AccessLog:
    def __init__(self, app: ASGIApp, quiet_paths: Iterable[str]) -> None:
        self._app, self._quiet = app, frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet:
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                _tell(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:  # an outer layer answers with status 500
            if not has_begun:
                has_begun = True
                _tell(scope, 500)
            raise
        finally:
            if not has_begun:
                _tell(scope, CLIENT_CLOSED_REQUEST)


def _tell(scope: Scope, status: int) -> None:
    client = scope.get("client")
    shown = (scope["method"], quote(scope["path"]), scope["http_version"], status, PHRASES.get(status, ""))
    log.info('%s - "%s %s HTTP/%s" %d %s', f"{client[0]}:{client[1]}" if client else "local", *shown)
