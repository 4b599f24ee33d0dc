"""The routes that score documents: /score and /rerank.

Prefill instances do all the work; no decode instance is used.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import RERANK, SCORE
from pd_cluster.api.routes.pooling.pooled_answers import PoolingUsage, answer_pooled, pooling_terms, pooling_usage
from pd_cluster.service.pooling.reranking import ScoreInput
from pd_cluster.service.schema.pooling.pooling_protocol import (
    PairsRequest,
    RerankRequest,
    ScoreRequest,
    parse_pooling,
)
from pd_cluster.service.text_service import TextService
from pd_cluster.types import PooledOutput


class ScoreItem(Struct):
    object: Literal["score"]
    index: int
    score: Annotated[float, Meta(description="A probability or a cosine; any number if `use_activation` is false.")]


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
    results: Annotated[list[RerankItem], Meta(description="The best first.")]
    usage: PoolingUsage


def score_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    _add_scores(routes, service)
    return routes


def _add_scores(routes: APIRouter, service: TextService) -> None:
    how_well = "How well documents answer a query, or how near texts are to each other."
    judged = Operation(how_well, Scores, ScoreRequest, SCORE)
    ranked = Operation("Documents, those that answer a query best first.", Reranked, RerankRequest, RERANK)

    @routes.post("/v1/score", operation_id="v1_score", openapi_extra=judged)
    @routes.post("/score", openapi_extra=judged)
    async def score(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, ScoreRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = pooling_terms("score", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        pairs, fields = request.pairs()
        pairs = await _shortened(service, request, pairs, http)
        ask = ScoreInput(pairs=pairs, fields=fields, **_judgement(request), **terms)
        generations = await service.scorer.generations(ask)

        def answer(vectors: list[PooledOutput]) -> Scores:
            data = [ScoreItem("score", at, each) for at, each in enumerate(service.scorer.scores(ask, vectors))]
            return Scores(terms["client_id"], "list", int(time.time()), model, data, pooling_usage(generations))

        return await answer_pooled(http, service, generations, answer)

    @routes.post("/v2/rerank", operation_id="v2_rerank", openapi_extra=ranked)
    @routes.post("/v1/rerank", operation_id="v1_rerank", openapi_extra=ranked)
    @routes.post("/rerank", openapi_extra=ranked)
    async def rerank(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, RerankRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = pooling_terms("rerank", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        pairs = await _shortened(service, request, request.pairs(), http)
        ask = ScoreInput(pairs=pairs, **_judgement(request), **terms)
        generations = await service.scorer.generations(ask)

        def answer(vectors: list[PooledOutput]) -> Reranked:
            scores = service.scorer.scores(ask, vectors)
            best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: request.top_n or None]
            shows = request.return_documents is not False
            results = [
                RerankItem(at, scores[at], RerankedText(request.documents[at]) if shows else None) for at in best
            ]
            return Reranked(terms["client_id"], model, results, pooling_usage(generations))

        return await answer_pooled(http, service, generations, answer)


async def _shortened(
    service: TextService, request: PairsRequest, pairs: list[tuple[str, str]], http: Request
) -> list[tuple[str, str]]:
    limits = request.max_tokens_per_query or 0, request.max_tokens_per_doc or 0
    return await service.scorer.shortened(pairs, *limits, caller_of(http))


def _judgement(request: PairsRequest) -> dict[str, Any]:
    """Returns the fields of a ScoreInput that determine how its pairs are scored."""
    return {"instruction": request.instruction, "is_probability": request.use_activation is not False}
