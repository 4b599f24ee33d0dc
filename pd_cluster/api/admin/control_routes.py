"""Admin routes that act on the whole cluster, with vLLM's names and parameters.

cluster/members/cluster_control.py executes a command; this module parses it and answers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec
from fastapi import APIRouter, Request

from pd_cluster.api.middleware.http_bodies import read_as, read_body
from pd_cluster.cluster.members.cluster_control import ClusterControl, PauseMode
from pd_cluster.errors import RequestError

MODES = get_args(PauseMode)
TAGS = {"weights", "kv_cache"}  # parts of an instance to wake up
MAX_IDS = 4096


class AbortIds(msgspec.Struct, forbid_unknown_fields=True):
    """The requests to end; without ids, all."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=MAX_IDS)] | None = None


def control_routes(control: ClusterControl, shown: Mapping[str, Any]) -> APIRouter:
    """`shown`: the answer of /server_info."""
    routes = APIRouter()
    _add_pause(routes, control)
    _add_sleep(routes, control)

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(http: Request) -> dict[str, Any]:
        asked = _asked(http, "reset_running_requests", "reset_external")
        if _switch(asked, name := "reset_running_requests", default=False):
            raise RequestError(f"{name}: running requests keep their blocks; end them first with POST /pause", name)
        await control.reset_caches(_switch(asked, "reset_external", default=False))
        return {"success": True}

    @routes.post("/abort_requests")
    async def abort_requests(http: Request) -> dict[str, Any]:
        asked = read_as(await read_body(http) or b"{}", AbortIds)
        if asked.request_ids == []:
            raise RequestError("request_ids: empty; leave it out to end all requests", param="request_ids")
        await control.abort(asked.request_ids or ())
        return {"status": "aborted"}

    @routes.post("/inference/v1/abort_requests")
    async def abort_named_requests(http: Request) -> dict[str, Any]:
        """Ends the requests with the given ids; as in vLLM, the ids are required."""
        asked = read_as(await read_body(http) or b"{}", AbortIds)
        if not asked.request_ids:
            raise RequestError("request_ids: missing; POST /abort_requests without them ends all", "request_ids")
        await control.abort(asked.request_ids)
        return {"status": "aborted"}

    @routes.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return dict(shown)

    return routes


def _add_pause(routes: APIRouter, control: ClusterControl) -> None:
    @routes.post("/pause")
    async def pause(http: Request) -> dict[str, Any]:
        asked = _asked(http, "mode", "clear_cache", "wait_for_inflight_requests")
        waits = _switch(asked, "wait_for_inflight_requests", default=False)
        default: PauseMode = "wait" if waits else "abort"
        await control.pause(_mode(asked, default), _switch(asked, "clear_cache", default=True))
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume(http: Request) -> dict[str, Any]:
        _asked(http)
        await control.resume()
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": control.is_paused}


def _add_sleep(routes: APIRouter, control: ClusterControl) -> None:
    @routes.post("/sleep")
    async def sleep(http: Request) -> dict[str, Any]:
        asked = _asked(http, "level", "mode")
        level, mode = asked.get("level", "1"), _mode(asked, "abort")
        if level == "0":  # a pause in vLLM
            raise RequestError("level: 0 frees no memory; use POST /pause", param="level")
        if level not in ("1", "2"):
            raise RequestError(
                f"level: {reprlib.repr(level)}; give 1 (without KV cache) or 2 (without weights, too)", param="level"
            )
        await control.sleep(1 if level == "1" else 2, mode)
        return {"status": "asleep", "level": int(level)}

    @routes.post("/wake_up")
    async def wake_up(http: Request) -> dict[str, Any]:
        _asked(http, "tags")
        tags = {tag for given in http.query_params.getlist("tags") for tag in given.split(",")}
        if tags and tags != TAGS:
            raise RequestError(
                f"tags: {reprlib.repr(','.join(sorted(tags)))}; instances wake up as a whole; leave tags out",
                param="tags",
            )
        await control.wake_up()
        return {"status": "awake"}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": control.is_asleep, "level": control.cluster_sleep.level}


def _mode(asked: Mapping[str, str], default: PauseMode) -> PauseMode:
    """Raises RequestError."""
    mode = asked.get("mode", default)
    if mode not in MODES:
        raise RequestError(
            f"mode: {reprlib.repr(mode)}; give abort (running requests end now), wait (they finish) or keep "
            f"(they stop, and continue afterwards)",
            param="mode",
        )
    found: PauseMode = mode  # type: ignore[assignment]  # checked above
    return found


def _asked(http: Request, *known: str) -> dict[str, str]:
    """Returns the parameters of the query. Raises RequestError for unknown ones."""
    for name in http.query_params:
        if name not in known:
            raise RequestError(f"{reprlib.repr(name)}: not known; known are {', '.join(known) or 'none'}")
    return dict(http.query_params)


def _switch(asked: Mapping[str, str], name: str, default: bool) -> bool:
    """Raises RequestError."""
    value = asked.get(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise RequestError(f"{name}: {reprlib.repr(asked[name])}; give true or false", param=name)
    return value in ("true", "1")
