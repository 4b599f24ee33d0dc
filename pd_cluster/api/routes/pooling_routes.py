"""The routes of pooling requests: embeddings, scores, reranking.

Prefill instances do all of the work; there is no decode leg.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import json_response, read_request, unless_disconnected
from pd_cluster.api.middleware.http_callers import caller_of, reserve_tokens
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import EMBEDDING, RERANK, SCORE
from pd_cluster.api.routes.openai_routes import served_by
from pd_cluster.api.routes.request_names import name_of
from pd_cluster.service.generation.prompt_generation import Generation, PromptTokensDetails, usage_of
from pd_cluster.service.pooling.embedder import EmbeddingInput
from pd_cluster.service.pooling.pooled_prompts import numbers_of
from pd_cluster.service.pooling.reranking import ScoreInput
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST
from pd_cluster.service.schema.pooling_protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    parse_pooling,
)
from pd_cluster.service.text_service import TextService
from pd_cluster.types import PooledOutput

FEW_NBYTES = 64 << 10  # larger answers are built on a thread


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingItem(Struct):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str, Meta(description="The vector as numbers, or with base64 as float32 bytes, little endian.")
    ]


class Embeddings(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage


class ScoreItem(Struct):
    object: Literal["score"]
    index: int
    score: Annotated[float, Meta(description="A probability or a cosine; with `use_activation` false, any number.")]


class Scores(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage


class RerankedText(Struct):
    text: str


class RerankItem(Struct, omit_defaults=True):
    index: Annotated[int, Meta(description="The document's index in the request.")]
    relevance_score: float
    document: RerankedText | None = None


class Reranked(Struct):
    id: str
    model: str
    results: Annotated[list[RerankItem], Meta(description="The documents, best first.")]
    usage: PoolingUsage


def pooling_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    _add_embeddings(routes, service)
    _add_scores(routes, service)
    return routes


def _add_embeddings(routes: APIRouter, service: TextService) -> None:
    @routes.post(
        "/v1/embeddings", openapi_extra=Operation("The vectors of texts.", Embeddings, EmbeddingRequest, EMBEDDING)
    )
    async def embeddings(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, EmbeddingRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = _terms("embd", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        inputs = request.inputs()
        generations = await service.embedder.generations(
            [
                EmbeddingInput(
                    prompt=prompt,
                    dimensions=request.dimensions,
                    normalizes=request.normalizes,
                    special=request.add_special_tokens is not False,
                    field=f"input[{at}]" if len(inputs) > 1 else "input",
                    **terms,
                )
                for at, prompt in enumerate(inputs)
            ]
        )

        def answer(vectors: list[PooledOutput]) -> Embeddings:
            shown = _base64 if request.encoding_format == "base64" else numbers_of
            data = [
                EmbeddingItem("embedding", at, shown(each.vector, request.dimensions))
                for at, each in enumerate(vectors)
            ]
            return Embeddings(terms["client_id"], "list", int(time.time()), model, data, _usage(generations))

        return await _answered(http, service, generations, answer)


def _add_scores(routes: APIRouter, service: TextService) -> None:
    how_well = "How well documents answer a query, or how near texts are to each other."
    judged = Operation(how_well, Scores, ScoreRequest, SCORE)
    ranked = Operation("Documents, sorted by how well they answer a query.", Reranked, RerankRequest, RERANK)

    @routes.post("/v1/score", operation_id="v1_score", openapi_extra=judged)
    @routes.post("/score", openapi_extra=judged)
    async def score(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, ScoreRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = _terms("score", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        pairs, fields = request.pairs()
        ask = ScoreInput(pairs=pairs, fields=fields, **_judgement(request), **terms)
        generations = await service.scorer.generations(ask)

        def answer(vectors: list[PooledOutput]) -> Scores:
            data = [ScoreItem("score", at, each) for at, each in enumerate(service.scorer.scores(ask, vectors))]
            return Scores(terms["client_id"], "list", int(time.time()), model, data, _usage(generations))

        return await _answered(http, service, generations, answer)

    @routes.post("/v2/rerank", operation_id="v2_rerank", openapi_extra=ranked)
    @routes.post("/v1/rerank", operation_id="v1_rerank", openapi_extra=ranked)
    @routes.post("/rerank", openapi_extra=ranked)
    async def rerank(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, RerankRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = _terms("rerank", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        ask = ScoreInput(pairs=request.pairs(), **_judgement(request), **terms)
        generations = await service.scorer.generations(ask)

        def answer(vectors: list[PooledOutput]) -> Reranked:
            scores = service.scorer.scores(ask, vectors)
            best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: request.top_n or None]
            shows = request.return_documents is not False
            results = [
                RerankItem(at, scores[at], RerankedText(request.documents[at]) if shows else None) for at in best
            ]
            return Reranked(terms["client_id"], model, results, _usage(generations))

        return await _answered(http, service, generations, answer)


async def _answered(
    http: Request,
    service: TextService,
    generations: list[Generation],
    answer: Callable[[list[PooledOutput]], msgspec.Struct],
) -> Response:
    """Computes all prompts and answers, unless the client leaves first."""
    reserve_tokens(http, generations)
    found = await unless_disconnected(http.receive, service.embedder.vectors(generations))
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    is_large = sum(len(each.vector) for each in found) > FEW_NBYTES
    return await json_response(lambda: answer(found), large=is_large, headers=served_by(generations))


def _terms(prefix: str, request: PoolingRequest, http: Request, received_s: float, variant: str) -> dict[str, Any]:
    """Returns the fields of a PoolingInput."""
    return {
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "cache_salt": request.cache_salt,
        "variant": variant,
        "priority": request.priority or 0,
        "session": caller_of(http).session,
        "client_id": f"{prefix}-{name_of(request.request_id, http) or secrets.token_hex(12)}",
        "received_s": received_s,
        "caller": caller_of(http),
    }


def _judgement(request: ScoreRequest | RerankRequest) -> dict[str, Any]:
    """Returns the fields of a ScoreInput that determine the scores of its pairs."""
    return {"instruction": request.instruction, "is_probability": request.use_activation is not False}


def _usage(generations: list[Generation]) -> PoolingUsage:
    usage = usage_of(generations)
    assert usage.prompt_tokens_details is not None, "known with the vectors"
    return PoolingUsage(usage.prompt_tokens, usage.total_tokens, usage.prompt_tokens_details)


def _base64(vector: bytes, dimensions: int | None) -> str:
    numbers_of(vector, dimensions)  # raises for bytes that are not a vector
    return base64.b64encode(vector).decode()
