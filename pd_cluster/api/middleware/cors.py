"""CORS for browsers, at no cost for other clients."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from pd_cluster.api.middleware.metering import RATE_HEADERS

EXPOSED_HEADERS = ("Retry-After", "x-pd-served-by", "x-request-id", "x-pd-resume-token", *RATE_HEADERS)


class Cors(CORSMiddleware):
    """Applies Starlette's CORS to requests with an Origin header. Other requests pass through unchanged."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"origin" for name, _ in scope.get("headers", ())):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
