"""API keys at the public port: without one, a request goes no further than here.

Knows nothing of routes but the few paths that need no key, or one of their own; every other path needs an API key if
there are any, also one that does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from pd_cluster.api.caller import SCOPE, Caller
from pd_cluster.api.error_answers import error_response
from pd_cluster.api.http import LOOKING
from pd_cluster.errors import Unauthorized

OPEN_PATHS = ("/health", "/ping", "/live")  # for probes, and only to look at
METRICS_PATH = "/metrics"


class ApiKeys:
    """`Authorization: Bearer KEY` with one of the keys, else 401; the request's body is not read before.

    A preflight has no key: CORS answers it outside of here. Paths are compared as the router has them, decoded and
    whole, behind `root_path`; what looks like an open path and is not exactly one is closed. Routes find the key's
    tenant as the request's caller.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        root_path: str = "",
        tenants: Sequence[str] = (),
        shares_prefix_cache: bool = False,
        metrics_key: str = "",
    ) -> None:
        """`tenants`: a name for each key; without them each key is a tenant of its own."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        names = [f"name:{name}" for name in tenants] or [f"key:{digest.hex()}" for digest in self._digests]
        self._callers = [Caller(name, "" if shares_prefix_cache else name) for name in names]
        self._metrics_digests = [_digest(metrics_key.encode())] if metrics_key else []
        self._open = {root_path + path for path in OPEN_PATHS}
        self._metrics_path = root_path + METRICS_PATH

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        is_metrics = scope["path"].rstrip("\n") == self._metrics_path  # routes match before a last newline, too
        digests = self._metrics_digests if is_metrics else self._digests
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        found = _place(given[0], digests) if len(given) == 1 else None
        if found is not None and not is_metrics:
            await self._app({**scope, SCOPE: self._callers[found]}, receive, send)
            return
        if found is not None or (not is_metrics and not digests):
            await self._app(scope, receive, send)
            return
        if is_metrics and not digests:
            why = "the metrics are closed, because there are API keys and no --metrics-key; start the server with one"
        else:
            of = "metrics" if is_metrics else "API"
            why = f"the {of} key is wrong" if given else f"{'a' if is_metrics else 'an'} {of} key is needed"
        error = Unauthorized(f"{why}; send `Authorization: Bearer KEY`", code="invalid_api_key")
        response = error_response(error)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["method"] in LOOKING and scope["path"] in self._open


def _place(header: bytes, digests: Sequence[bytes]) -> int | None:
    """Which of these keys it is. Takes as long for a wrong key as for a right one."""
    scheme, _, key = header.partition(b" ")
    digest = _digest(key.strip())
    matches = [hmac.compare_digest(digest, known) for known in digests]  # all are compared, whichever it is
    return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
