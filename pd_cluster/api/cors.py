"""CORS for browsers, at no cost for everybody else."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

EXPOSED_HEADERS = ("Retry-After", "x-pd-served-by", "x-request-id")


class Cors(CORSMiddleware):
    """Starlette's, for requests that name an Origin. Others are passed on as they are, stream and all."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"origin" for name, _ in scope.get("headers", ())):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
