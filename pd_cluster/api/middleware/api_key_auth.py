"""Checks API keys at the public port.

If there are API keys, every path needs one, even an unknown path, except a few that need no key or a separate key.
Knows nothing of other routes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pd_cluster.api.middleware.error_responses import error_response
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.api.middleware.http_bodies import LOOKING
from pd_cluster.api.middleware.http_callers import SCOPE
from pd_cluster.api.middleware.metering import run_metered
from pd_cluster.cluster.tenancy.tenant_counts import OTHERS, TenantCounts
from pd_cluster.errors import Unauthorized
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.callers.usage_meter import Meter
from pd_cluster.service.schema.error_bodies import MESSAGES_PATHS
from pd_cluster.settings.http_settings import HttpConfig

OPEN_PATHS = ("/health", "/ping", "/live")  # read-only paths for probes
NAMED = "name:"  # prefix of owners that are named tenants
METRICS_PATH, LOAD_PATH = "/metrics", "/load"


def owners_of(http: HttpConfig) -> list[str]:
    """Returns the owner of each key of the settings, in their order; without tenants, each key is its own owner."""
    return [f"{NAMED}{name}" for name in http.tenants] or [
        f"key:{digest_of_key(key.encode()).hex()}" for key in http.api_keys
    ]


class ApiKeys:
    """Requires `Authorization: Bearer KEY` with one of the keys; otherwise 401 before the request's body is read.

    Only Anthropic's routes also take `X-API-Key: KEY`, which Anthropic's clients send.

    Preflights have no key; the CORS layer answers them before this one. Paths are compared as the router compares them:
    whole, decoded, and under `root_path`. A path that only resembles an open one needs a key. Routes get the key's
    tenant as the request's caller, with the request's meter.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig, counts: TenantCounts, file_keys: FileKeys | None = None) -> None:
        """Without tenant names, each key is a separate tenant. `file_keys`: further keys."""
        self._app, self._counts, self._file_keys = app, counts, file_keys
        self._shares_prefix_cache, root_path = http.shares_prefix_cache, http.root_path
        self._digests = [digest_of_key(key.encode()) for key in http.api_keys]
        self._callers = [self._caller(name) for name in owners_of(http)]
        self._tenants = http.tenants or [OTHERS for _ in http.api_keys]
        self._metrics_digests = [digest_of_key(http.metrics_key.encode())] if http.metrics_key else []
        self._open = {root_path + path for path in OPEN_PATHS}
        self._metrics_path, self._load_path = root_path + METRICS_PATH, root_path + LOAD_PATH
        self._messages_paths = {root_path + path for path in MESSAGES_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        is_metrics = scope["path"].rstrip("\n") == self._metrics_path  # routes also match before a final newline
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = _key_of(given[0]) if len(given) == 1 else None
        if not given and scope["path"] in self._messages_paths:
            given = [value for name, value in scope["headers"] if name == b"x-api-key"]
            key = given[0].strip() if len(given) == 1 else None
        if scope["path"] == self._load_path and place_of(key, self._metrics_digests) is not None:
            await self._app(scope, receive, send)
            return
        if is_metrics or not (self._digests or self._file_keys):
            is_let_in = not is_metrics or place_of(key, self._metrics_digests) is not None
            app = self._app if is_let_in else self._refusal(scope["path"], is_metrics, bool(given))
            await app(scope, receive, send)
            return
        try:
            found = self._known(key)
        except Unauthorized as error:  # the key has expired
            await _refusal(error, scope["path"])(scope, receive, send)
            return
        if found is None:
            await self._refusal(scope["path"], is_metrics, bool(given))(scope, receive, send)
            return
        caller, meter = found
        await run_metered(meter, self._app, {**scope, SCOPE: replace(caller, meter=meter)}, receive, send)

    def _known(self, key: bytes | None) -> tuple[Caller, Meter] | None:
        """Returns the key's caller and the request's meter. Raises Unauthorized for an expired key."""
        if (at := place_of(key, self._digests)) is not None:
            return self._callers[at], Meter(self._tenants[at], self._counts)
        known = self._file_keys.find(key) if self._file_keys is not None and key is not None else None
        if known is None:
            return None
        caller = replace(self._caller(f"{NAMED}{known.key.tenant}"), models=known.key.models)
        return caller, Meter(known.key.tenant, self._counts, known.account)

    def _caller(self, name: str) -> Caller:
        return Caller(name, "" if self._shares_prefix_cache else name)

    def _refusal(self, path: str, is_metrics: bool, has_key: bool) -> Response:
        if is_metrics and not self._metrics_digests:
            why = "/metrics is closed, because there are API keys but no --metrics-key; start the server with one"
        else:
            of = "metrics" if is_metrics else "API"
            why = f"the {of} key is wrong" if has_key else f"{'a' if is_metrics else 'an'} {of} key is needed"
        return _refusal(Unauthorized(f"{why}; send `Authorization: Bearer KEY`", code="invalid_api_key"), path)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["method"] in LOOKING and scope["path"] in self._open


def _refusal(error: Unauthorized, path: str) -> Response:
    response = error_response(error, path)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _key_of(header: bytes) -> bytes | None:
    """Returns the key; None for a scheme other than Bearer."""
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def place_of(key: bytes | None, digests: Sequence[bytes]) -> int | None:
    """Returns the key's index; None for a wrong key, which takes the same time."""
    digest = digest_of_key(key or b"")
    matches = [hmac.compare_digest(digest, known) for known in digests]  # compares all, even after a match
    return matches.index(True) if key is not None and any(matches) else None


def digest_of_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
