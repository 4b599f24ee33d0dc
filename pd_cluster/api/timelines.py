"""Admin routes of what became of the last requests: /requests and /requests/{id}/timeline."""

from __future__ import annotations

import reprlib
from typing import Any

from fastapi import APIRouter

from pd_cluster.cluster.timeline import Timelines
from pd_cluster.errors import RequestError, RequestNotFound

DEFAULT_LIMIT = 20


def timeline_routes(timelines: Timelines) -> APIRouter:
    routes = APIRouter()

    @routes.get("/requests")
    async def requests(limit: str = str(DEFAULT_LIMIT)) -> dict[str, Any]:
        most = _limit(limit, timelines.max_requests)
        return {"requests": timelines.last(most), "num_kept": len(timelines), "max_kept": timelines.max_requests}

    @routes.get("/requests/{request_id}/timeline")
    async def timeline(request_id: str) -> dict[str, Any]:
        found = timelines.find(request_id)
        if found is None:
            raise RequestNotFound(
                f"id: no request {reprlib.repr(request_id)} is kept; of the last {timelines.max_requests} at most, "
                f"{len(timelines)} are: GET /requests, or `pd-cluster trace` without an id, lists them",
                param="id",
                code="request_not_found",
            )
        return found.to_json()

    return routes


def _limit(text: str, most: int) -> int:
    """Raises RequestError."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"limit: {reprlib.repr(text)}; give a number from 1 to {most}", param="limit")
    return int(text)
