"""Requests for a route of a fixed path go straight to its endpoint, past the framework's stack and its list of routes.

That stack costs as much as all else between the socket and an endpoint. It serves what is left: paths with parameters,
methods that a path does not have, unknown paths.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.api.gate.error_answers import error_response
from pd_cluster.api.gate.http import PlainRoute
from pd_cluster.errors import PdClusterError

Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """`routes`: as the app has them, filled before its first request."""

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
    """The first route of a path counts, as in the framework's list."""
    found: dict[tuple[str, str], Endpoint] = {}
    for route in routes:
        if isinstance(route, PlainRoute) and "{" not in route.path:
            handler = route.get_route_handler()
            for method in route.methods or ():
                found.setdefault((method, root_path + route.path), handler)
    return found
