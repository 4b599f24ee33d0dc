"""Calls the endpoints of fast routes directly, without FastAPI's stacks of contexts and its search through all routes.

These two cost as much as everything else between the socket and an endpoint. FastAPI still serves all other requests:
paths with parameters, methods that a path does not have, unknown paths, and every route that is not a PlainRoute.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.api.middleware.error_responses import error_response
from pd_cluster.api.middleware.http_bodies import declared_length
from pd_cluster.api.middleware.request_reservation import arrival_of
from pd_cluster.errors import PdClusterError

Endpoint = Callable[[Request], Awaitable[Response]]


class PlainRoute(APIRoute):
    """A route whose endpoint reads the request and builds the response itself: FastAPI does neither.

    Dependencies are ignored, so FastAPI's stacks of contexts for them are not needed.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
        else:
            await self._plain(scope, receive, send)

    @functools.cached_property
    def _plain(self) -> ASGIApp:
        return request_response(self.get_route_handler())


def add_routes(app: FastAPI, routes: APIRouter) -> None:
    """Adds plain routes to the app itself, because FastAPI searches an included router twice for each request."""
    assert all(isinstance(route, PlainRoute) for route in routes.routes)
    app.router.routes.extend(routes.routes)


class GeneratingRoute(PlainRoute):
    """A route whose requests queue. A request that would wait too long is refused before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def admitted(http: Request) -> Response:
            if (arrival := arrival_of(http)) is not None:
                arrival.asks(http, declared_length(http))
            return await handler(http)

        return admitted


class Direct:
    """Passes requests for plain routes of fixed paths directly to their endpoints.

    `routes`: the app's list, filled before its first request.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[object], root_path: str) -> None:
        self._app, self._routes, self._root_path = app, routes, root_path
        self._endpoints: dict[tuple[str, str], Endpoint] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._endpoints:
            self._endpoints = _endpoints(self._routes, self._root_path)
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, noting)
        except PdClusterError as error:
            if has_begun:
                raise
            await error_response(error, scope["path"])(scope, receive, send)


def _endpoints(routes: Iterable[object], root_path: str) -> dict[tuple[str, str], Endpoint]:
    """Returns (path, method) -> endpoint; as in FastAPI, the first route with a path takes precedence."""
    found: dict[tuple[str, str], Endpoint] = {}
    for route in routes:
        if isinstance(route, PlainRoute) and "{" not in route.path:
            handler = route.get_route_handler()
            for method in route.methods or ():
                found.setdefault((method, root_path + route.path), handler)
    return found
