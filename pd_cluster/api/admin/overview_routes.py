"""Admin route for all that people look at: instances, problems, and the last minutes, in one answer."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from pd_cluster import __version__
from pd_cluster.cluster.overview.watch import Overview
from pd_cluster.errors import RequestError

Instances = Callable[[], list[dict[str, Any]]]


def overview_routes(overview: Overview, instances: Instances, model: str) -> APIRouter:
    """`instances`: the entries of /instances."""
    routes = APIRouter()

    @routes.get("/overview")
    async def whole(request: Request) -> dict[str, Any]:
        """`since`: only samples after this Unix time. `since_mark`: only marks after this number."""
        since_s = _number(request, "since", -math.inf)
        since_mark = _number(request, "since_mark", 0)
        return {
            "version": __version__,
            "model": model,
            "instances": instances(),
            **overview.to_json(since_s, int(since_mark)),
        }

    return routes


def _number(request: Request, name: str, default: float) -> float:
    """Raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(f"{name}: {reprlib.repr(text)} is not a number", param=name)
    return value
