"""x-request-id: every answer carries the client's id, or a new id."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_NBYTES = 256


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and not any(
                name == HEADER for name, _ in message["headers"]
            ):  # a route may have set its own id
                message = {**message, "headers": [*message["headers"], (HEADER, request_id)]}
            await send(message)

        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        request_id = given if 0 < len(given) <= MAX_NBYTES else secrets.token_hex(16).encode()
        await self._app(scope, receive, send_with_id)
