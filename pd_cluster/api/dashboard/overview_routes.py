"""The route for all that people look at: instances, problems, and the last minutes, in one answer.

The admin port has it whole. `public_overview_routes` is the part for clients: figures, without addresses, processes,
and reasons.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster import __version__
from pd_cluster.cluster.overview.watch import Overview
from pd_cluster.errors import RequestError

Instances = Callable[[], list[dict[str, Any]]]
PUBLIC_FIELDS = (
    *("instance_id", "role", "next_role", "service", "state", "sleep_level", "num_running", "num_waiting"),
    *("num_landing", "num_exporting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks"),
    *("num_preemptions", "num_swap_blocks", "num_free_swap_blocks", "num_prefix_query_tokens"),
    *("num_prefix_hit_tokens", "num_steps", "kv_sent_nbytes", "kv_received_nbytes"),
)


def overview_routes(overview: Overview, instances: Instances, model: str) -> APIRouter:
    """`instances`: the entries of /instances."""
    return _routes(overview.to_json, instances, model)


def public_overview_routes(overview: Overview, instances: Instances, model: str) -> APIRouter:
    return _routes(overview.to_public, lambda: [_public(each) for each in instances()], model)


def _public(instance: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that clients see; peers lose their epochs, links their reasons."""
    links = {peer.partition("@")[0]: state.partition(":")[0] for peer, state in instance["links"].items()}
    return {**{name: instance[name] for name in PUBLIC_FIELDS}, "links": links}


def _routes(shown: Callable[[float, int], dict[str, Any]], instances: Instances, model: str) -> APIRouter:
    routes = APIRouter()

    @routes.get("/overview")
    async def whole(request: Request) -> Response:
        """`since`: only samples after this Unix time. `since_mark`: only marks after this number."""
        since_s = _number(request, "since", -math.inf)
        since_mark = _number(request, "since_mark", 0)
        body = {
            "version": __version__,
            "model": model,
            "instances": instances(),
            **shown(since_s, int(since_mark)),
        }  # written here: FastAPI would walk through each of the samples' figures first
        return Response(msgspec.json.encode(body), media_type="application/json", headers={"Cache-Control": "no-store"})

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
