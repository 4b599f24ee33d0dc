"""The dashboard at the public port, with --public-dashboard: figures for holders of an API key or a link.

It shows no commands, logs, requests, playground or addresses. It is a separate app in front of the API: the API's CORS,
keys and queue do not apply to it, and the API ignores its cookie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pd_cluster.api.admin.overview_routes import public_overview_routes
from pd_cluster.api.middleware.admin_access import HostNames
from pd_cluster.api.middleware.api_key_auth import digest_of_key, place_of
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.api.middleware.http_bodies import declared_length, guarded_by, read_as, read_body
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.errors import RequestError, Unauthorized
from pd_cluster.extras.dashboard.dashboard_routes import (
    DATA,
    PageView,
    SessionGuard,
    begun,
    check_origin,
    exchanged,
    session_routes,
)
from pd_cluster.extras.dashboard.dashboard_sessions import Sessions

ROOT = "/dashboard"
MAX_LOGIN_NBYTES = 4096


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a login: a code or an API key."""

    code: str = ""
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class PublicView:
    """The parts of the cluster that it shows. `hosts`: the host names under which it answers.

    `sessions` are shared with the admin port, which makes the codes.
    """

    overview: Overview
    instances: Callable[[], list[dict[str, Any]]]
    model: str
    sessions: Sessions
    root_path: str
    hosts: HostNames


class PublicDashboard:
    """Passes the dashboard's paths to its own app, other paths to the API. Paths begin with `root_path`."""

    def __init__(self, app: ASGIApp, pages: ASGIApp, root_path: str) -> None:
        self._app, self._pages = app, pages
        self._num_root = len(root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"][self._num_root :] if scope["type"] == "http" else ""
        if path != ROOT and not path.startswith(f"{ROOT}/"):
            await self._app(scope, receive, send)
            return
        await self._pages({**scope, "root_path": "", "path": path}, receive, send)


def public_pages(view: PublicView, api_keys: Sequence[str], file_keys: FileKeys | None) -> FastAPI:
    app = FastAPI(title="pd-cluster dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    shown = PageView(is_whole=False, takes_keys=bool(api_keys) or file_keys is not None)
    guard = SessionGuard(view.sessions, shown, view.hosts)
    figures = public_overview_routes(view.overview, view.instances, view.model)
    app.include_router(figures, prefix=DATA, dependencies=[guarded_by(guard.check), guarded_by(guard.check_pace)])
    app.include_router(_login_routes(view, shown, KeyCheck(api_keys, file_keys)))
    app.include_router(session_routes(guard, shown, view.root_path))
    return app


class KeyCheck:
    """Recognizes the keys of the public port. Stores only digests."""

    def __init__(self, api_keys: Sequence[str], file_keys: FileKeys | None) -> None:
        self._digests = [digest_of_key(key.encode()) for key in api_keys]
        self._file_keys = file_keys

    def validity(self, key: str) -> Callable[[], bool]:
        """Returns a function that says whether the key is still valid. Raises Unauthorized for an invalid key."""
        if place_of(key.encode(), self._digests) is not None:
            return lambda: True
        found = self._file_keys.validity(key.encode()) if self._file_keys is not None else None
        if found is None:
            raise Unauthorized("api_key: wrong", code="invalid_api_key")
        return found


def _login_routes(view: PublicView, shown: PageView, keys: KeyCheck) -> APIRouter:
    routes = APIRouter()

    @routes.post(f"{DATA}/session", dependencies=[guarded_by(view.hosts.check)])
    async def begin(request: Request) -> Response:
        check_origin(request)
        if (declared := declared_length(request)) is None or declared > MAX_LOGIN_NBYTES:
            raise RequestError(f"body: give its length, at most {MAX_LOGIN_NBYTES} bytes")
        asked = read_as(await read_body(request), Login)
        if bool(asked.code) == bool(asked.api_key):
            raise RequestError("body: give code or api_key")
        if asked.code:
            found = exchanged(view.sessions, asked.code)
        else:
            found = view.sessions.begin(keys.validity(asked.api_key), owner=digest_of_key(asked.api_key.encode()))
        return begun(request, *found, shown, view.root_path)

    return routes
