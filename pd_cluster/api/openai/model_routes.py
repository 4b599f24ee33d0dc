"""The models served: /v1/models and /v1/models/{name}."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pd_cluster.api.gate.callers import caller_of
from pd_cluster.api.gate.http import LOOKING, PlainRoute
from pd_cluster.service.service import TextService


def model_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)
    created = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        is_adapter = name in service.names.adapters
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pd-cluster",
            "root": name if is_adapter else service.names.model,
            **({"parent": service.names.own[0]} if is_adapter else {}),
            "max_model_len": service.max_model_len,
            **({"unproven": True} if service.is_unproven else {}),
        }

    @routes.api_route("/v1/models/", methods=LOOKING)
    @routes.api_route("/v1/models", methods=LOOKING)
    async def models(http: Request) -> Response:
        caller = caller_of(http)
        names = [*service.names.for_caller(caller), *service.names.adapters_for(caller)]
        return JSONResponse({"object": "list", "data": [entry(name) for name in names]})

    @routes.api_route("/v1/models/{name:path}", methods=LOOKING)  # model names may contain slashes
    async def model(http: Request) -> Response:
        return JSONResponse(entry(service.names.check(http.path_params["name"], caller_of(http))))

    return routes
