"""Admin routes for the last requests: /requests, /requests/trace and /requests/{id}/timeline.

Each of several API processes has the timelines of its own requests; the scheduler queries all processes.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from fastapi import APIRouter, FastAPI, Response

from pd_cluster.api.admin.served_trace import MOONCAKE_BLOCK_TOKENS, described, parsed_block_tokens, trace_lines
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.cluster.records.request_timeline import MAX_REQUESTS, Timelines
from pd_cluster.cluster.routing.served_requests import ServedRequests
from pd_cluster.errors import Refused, RequestError, RequestNotFound

DEFAULT_LIMIT = 20
ANSWER_TIMEOUT_S = 3.0


class TimelineSource(Protocol):
    max_requests: int

    async def last(self, limit: int) -> dict[str, Any]:
        """Returns the body of /requests."""

    async def find(self, request_id: str) -> dict[str, Any] | None:
        """Returns the body of /requests/{id}/timeline."""

    async def served(self) -> list[dict[str, Any]] | None:
        """Returns the records of served requests; None: records are disabled."""


class LocalTimelines:
    def __init__(self, timelines: Timelines, served: ServedRequests | None = None) -> None:
        self._timelines, self._served = timelines, served
        self.max_requests = timelines.max_requests

    async def last(self, limit: int) -> dict[str, Any]:
        known = self._timelines
        return {"requests": known.last(limit), "num_kept": len(known), "max_kept": known.max_requests}

    async def find(self, request_id: str) -> dict[str, Any] | None:
        found = self._timelines.find(request_id)
        return found.to_json() if found is not None else None

    async def served(self) -> list[dict[str, Any]] | None:
        return described(self._served.last()) if self._served is not None and self._served.max_requests else None


class RemoteTimelines:
    """Queries the timelines of several processes over Unix sockets; leaves out a process that does not answer."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.max_requests = MAX_REQUESTS * len(paths)
        self._paths = paths

    async def last(self, limit: int) -> dict[str, Any]:
        answers = await self._ask(f"/requests?limit={min(limit, MAX_REQUESTS)}")
        found = [request for answer in answers for request in answer["requests"]]
        found.sort(key=lambda request: request["age_s"])
        num_kept = sum(answer["num_kept"] for answer in answers)
        return {"requests": found[:limit], "num_kept": num_kept, "max_kept": self.max_requests}

    async def find(self, request_id: str) -> dict[str, Any] | None:
        answers = await self._ask(f"/requests/{quote(request_id, safe='')}/timeline")
        return answers[0] if answers else None

    async def served(self) -> list[dict[str, Any]] | None:
        answers = [answer["served"] for answer in await self._ask("/served")]
        known = [served for served in answers if served is not None]
        return [request for served in known for request in served] if known else None

    async def _ask(self, path: str) -> list[dict[str, Any]]:
        """Returns the bodies of successful answers."""
        found = await asyncio.gather(*(self._ask_one(each, path) for each in self._paths))
        return [body for body in found if body is not None]

    async def _ask_one(self, socket_path: Path, path: str) -> dict[str, Any] | None:
        transport = httpx.AsyncHTTPTransport(uds=str(socket_path))
        try:
            async with httpx.AsyncClient(transport=transport, timeout=ANSWER_TIMEOUT_S) as client:
                answer = await client.get(f"http://api{path}")
        except httpx.HTTPError:
            return None
        body: dict[str, Any] = answer.json()
        return body if answer.status_code == 200 else None


def timeline_routes(timelines: TimelineSource) -> APIRouter:
    routes = APIRouter()

    @routes.get("/requests")
    async def requests(limit: str = str(DEFAULT_LIMIT)) -> dict[str, Any]:
        return await timelines.last(_limit(limit, timelines.max_requests))

    @routes.get("/requests/trace")
    async def trace(block_tokens: str = str(MOONCAKE_BLOCK_TOKENS)) -> Response:
        size = parsed_block_tokens(block_tokens)
        if (served := await timelines.served()) is None:
            raise Refused("the scheduler keeps no lengths of requests; start it with --trace-requests, such as 10000")
        return Response("".join(trace_lines(served, size)), media_type="application/jsonl")

    @routes.get("/requests/{request_id}/timeline")
    async def timeline(request_id: str) -> dict[str, Any]:
        found = await timelines.find(request_id)
        if found is None:
            kept = await timelines.last(1)
            raise RequestNotFound(
                f"id: the scheduler keeps no request {reprlib.repr(request_id)}, only the last {kept['num_kept']} (at "
                f"most {kept['max_kept']}); GET /requests, or `pd-cluster trace` without an id, lists them",
                param="id",
                code="request_not_found",
            )
        return found

    return routes


def timeline_app(timelines: Timelines, served: ServedRequests) -> FastAPI:
    """Makes the app for the scheduler's queries to one process. Keys of blocks leave a process only in its answers."""
    source = LocalTimelines(timelines, served)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    app.include_router(timeline_routes(source))

    @app.get("/served")
    async def all_served() -> dict[str, Any]:
        return {"served": await source.served()}

    return app


def _limit(text: str, most: int) -> int:
    """Parses the limit. Raises RequestError."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"limit: {reprlib.repr(text)}; give a number from 1 to {most}", param="limit")
    return int(text)
