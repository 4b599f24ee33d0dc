"""The routes that return a vector for each text: OpenAI's /v1/embeddings and vLLM's /pooling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import EMBEDDING, POOLING
from pd_cluster.api.routes.pooling.pooled_answers import (
    PoolingUsage,
    answer_pooled,
    base64_of,
    pooling_terms,
    pooling_usage,
)
from pd_cluster.service.pooling.embedder import EmbeddingInput
from pd_cluster.service.pooling.pooled_prompts import numbers_of
from pd_cluster.service.schema.pooling.pooling_protocol import (
    EmbeddingRequest,
    InputRequest,
    TaskRequest,
    parse_pooling,
)
from pd_cluster.service.text_service import TextService
from pd_cluster.types import PooledOutput


class EmbeddingItem(Struct):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str, Meta(description="Numbers, or with base64 their float32 bytes, little endian.")
    ]


class Embeddings(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage


class PooledItem(Struct):
    object: Literal["pooling"]
    index: int
    data: Annotated[list[float] | str, Meta(description="A vector, or a value for each class.")]


class PooledItems(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledItem]
    usage: PoolingUsage


def vector_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    _add_embeddings(routes, service)
    _add_pooling(routes, service)
    return routes


def inputs_of(request: InputRequest, terms: dict[str, Any], **more: Any) -> list[EmbeddingInput]:
    """Returns each input of a request. Raises RequestError."""
    inputs = request.inputs()
    return [
        EmbeddingInput(
            prompt=prompt,
            special=request.add_special_tokens is not False,
            keeps_first=request.truncation_side == "right",
            field=f"input[{at}]" if len(inputs) > 1 else "input",
            **more,
            **terms,
        )
        for at, prompt in enumerate(inputs)
    ]


def _vectors_of(request: EmbeddingRequest, terms: dict[str, Any]) -> list[EmbeddingInput]:
    return inputs_of(request, terms, dimensions=request.dimensions, normalizes=request.normalizes)


def _shown(request: EmbeddingRequest) -> Callable[[bytes, int | None], list[float] | str]:
    return base64_of if request.encoding_format == "base64" else numbers_of


def _add_embeddings(routes: APIRouter, service: TextService) -> None:
    @routes.post(
        "/v1/embeddings", openapi_extra=Operation("The vectors of texts.", Embeddings, EmbeddingRequest, EMBEDDING)
    )
    async def embeddings(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, EmbeddingRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = pooling_terms("embd", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        generations = await service.embedder.generations(_vectors_of(request, terms))

        def answer(vectors: list[PooledOutput]) -> Embeddings:
            shown, wanted = _shown(request), request.dimensions
            data = [EmbeddingItem("embedding", at, shown(each.vector, wanted)) for at, each in enumerate(vectors)]
            return Embeddings(terms["client_id"], "list", int(time.time()), model, data, pooling_usage(generations))

        return await answer_pooled(http, service, generations, answer)


def _add_pooling(routes: APIRouter, service: TextService) -> None:
    summary = "The vectors of texts, or a number for each class if the model is a classifier."

    @routes.post("/pooling", openapi_extra=Operation(summary, PooledItems, TaskRequest, POOLING))
    async def pooling(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, TaskRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = pooling_terms("pool", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        classifies = service.classifier.is_able if request.task is None else request.task == "classify"
        asks = _vectors_of(request, terms)
        generations = await (service.classifier if classifies else service.embedder).generations(asks)

        def shown(vector: PooledOutput) -> list[float] | str:
            if not classifies:
                return _shown(request)(vector.vector, request.dimensions)
            return service.classifier.numbers(vector, request.use_activation is not False)

        def answer(vectors: list[PooledOutput]) -> PooledItems:
            data = [PooledItem("pooling", at, shown(each)) for at, each in enumerate(vectors)]
            return PooledItems(terms["client_id"], "list", int(time.time()), model, data, pooling_usage(generations))

        is_long = classifies and service.classifier.takes_long(len(generations))
        return await answer_pooled(http, service, generations, answer, is_long)
