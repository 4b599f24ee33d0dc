"""The models served: /v1/models and /v1/models/{name}."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct

from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_bodies import LOOKING, json_of
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import Operation, path_parameter
from pd_cluster.service.text_service import TextService


class Model(Struct, omit_defaults=True, kw_only=True):
    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="When the server began to serve it; Unix time, in seconds.")]
    owned_by: str
    root: Annotated[str, Meta(description="The model folder, as given to the server; for an adapter, its name.")]
    parent: Annotated[str | None, Meta(description="For an adapter, the model.")] = None
    max_model_len: Annotated[int, Meta(description="Maximum number of prompt and output tokens together.")]
    unproven: Annotated[bool, Meta(description="Whether its model_type is unlisted, and served by --try-unlisted.")] = (
        False
    )


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


def model_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)
    created = int(time.time())
    listed = Operation("The model, by all its names.", ModelList)
    one = Operation("One name of the model.", Model, errors=(404,))
    one = one.at(path_parameter("name", example=service.names.own[0]))

    def entry(name: str) -> Model:
        is_adapter = name in service.names.adapters
        return Model(
            id=name,
            object="model",
            created=created,
            owned_by="pd-cluster",
            root=name if is_adapter else service.names.model,
            parent=service.names.own[0] if is_adapter else None,
            max_model_len=service.max_model_len,
            unproven=service.is_unproven,
        )

    @routes.api_route("/v1/models/", methods=LOOKING, include_in_schema=False)
    @routes.api_route("/v1/models", methods=LOOKING, openapi_extra=listed)
    async def models(http: Request) -> Response:
        caller = caller_of(http)
        names = [*service.names.for_caller(caller), *service.names.adapters_for(caller)]
        return json_of(ModelList("list", [entry(name) for name in names]))

    @routes.api_route("/v1/models/{name:path}", methods=LOOKING, openapi_extra=one)  # names may contain slashes
    async def model(http: Request) -> Response:
        return json_of(entry(service.names.check(http.path_params["name"], caller_of(http))))

    return routes
