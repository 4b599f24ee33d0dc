"""Calls the API's routes without connections, for batches: takes a request's body and returns the answer's."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Scope

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import BODY
from pd_cluster.api.middleware.http_callers import SCOPE
from pd_cluster.api.routes.api_routes import api_routes
from pd_cluster.errors import RequestError
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.text_service import TextService


class NoSuchUrl(RequestError):
    status = 404


class ApiAnswer(NamedTuple):
    """An answer: its JSON, and the number of generated tokens; 0 for vectors and scores."""

    body: bytes
    num_output_tokens: int


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Counted(msgspec.Struct):
    """The APIs' field names for the tokens of an answer."""

    completion_tokens: int = 0
    output_tokens: int = 0


class _Answered(msgspec.Struct):
    usage: _Counted | None = None


class InProcessApi:
    """Calls any route that uses instances, by its path. Keeps no state between calls."""

    def __init__(self, service: TextService) -> None:
        routes = [route for router in api_routes(service, None) for route in router.routes]
        self._endpoints: dict[str, Callable[[Request], Coroutine[Any, Any, Response]]] = {
            route.path: route.endpoint for route in routes if isinstance(route, GeneratingRoute)
        }

    @property
    def paths(self) -> list[str]:
        return sorted(self._endpoints)

    async def call(self, path: str, body: bytes, caller: Caller) -> ApiAnswer:
        """Answers as a POST to the path would. Raises NoSuchUrl, RequestError and what the service raises."""
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            shown = reprlib.repr(path)[1:-1]
            raise NoSuchUrl(f"url: {shown}: a batch supports {', '.join(self.paths)}", param="url", code="unknown_url")
        if _streams(body):
            raise RequestError("stream: a batch cannot be streamed; leave it out", "stream")
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": None}
        response = await endpoint(Request({**scope, SCOPE: caller, BODY: body}, _never))
        answer = bytes(response.body)
        usage = msgspec.json.decode(answer, type=_Answered).usage or _Counted()
        return ApiAnswer(answer, usage.completion_tokens + usage.output_tokens)


async def _never() -> Message:
    """Waits forever, because there is no client that could leave."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


def _streams(body: bytes) -> bool:
    """Whether the body asks for a stream; an invalid body is left to its route."""
    try:
        return msgspec.json.decode(body, type=_Streamed).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
