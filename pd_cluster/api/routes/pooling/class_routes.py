"""The routes that answer with how likely classes are: a classifier's own, or tokens of a generating model."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import GENERATIVE_SCORING
from pd_cluster.api.routes.pooling.pooled_answers import PoolingUsage, answer_pooled, pooling_terms, pooling_usage
from pd_cluster.api.routes.pooling.vector_routes import inputs_of
from pd_cluster.api.routes.request_names import name_of
from pd_cluster.service.pooling.label_scoring import LabelInput
from pd_cluster.service.schema.pooling.generative_scoring_protocol import GenerativeScoringRequest
from pd_cluster.service.schema.pooling.pooling_protocol import ClassifyRequest, parse_pooling
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.text_service import TextService
from pd_cluster.types import PooledOutput


class Classified(Struct):
    index: int
    label: Annotated[str, Meta(description="The likeliest class.")]
    probs: Annotated[
        list[float], Meta(description="The probability of each class; with `use_activation` false, its logit.")
    ]
    num_classes: int


class Classifications(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage


class LabelScore(Struct):
    object: Literal["score"]
    index: int
    score: Annotated[float, Meta(description="The probability of the first label.")]
    label_probs: Annotated[list[float], Meta(description="The probabilities of all labels, in the request's order.")]


class LabelScores(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[LabelScore]
    usage: PoolingUsage


def class_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    _add_classes(routes, service)
    _add_labels(routes, service)
    return routes


def _add_classes(routes: APIRouter, service: TextService) -> None:
    summary = "The class of each text, by a classifier."

    @routes.post("/classify", openapi_extra=Operation(summary, Classifications, ClassifyRequest))
    async def classify(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse_pooling(body, ClassifyRequest))
        model = service.names.check(request.model, caller_of(http))
        terms = pooling_terms("classify", request, http, received_s, service.names.lora_of(model, caller_of(http)))
        generations = await service.classifier.generations(inputs_of(request, terms))
        is_probability = request.use_activation is not False

        def shown(at: int, vector: PooledOutput) -> Classified:
            numbers = service.classifier.numbers(vector, is_probability)
            label = service.classifier.head.labels[numbers.index(max(numbers))]
            return Classified(at, label, numbers, len(numbers))

        def answer(vectors: list[PooledOutput]) -> Classifications:
            data = [shown(at, each) for at, each in enumerate(vectors)]
            usage = pooling_usage(generations)
            return Classifications(terms["client_id"], "list", int(time.time()), model, data, usage)

        is_long = service.classifier.takes_long(len(generations))
        return await answer_pooled(http, service, generations, answer, is_long)


def _add_labels(routes: APIRouter, service: TextService) -> None:
    summary = "The probabilities of given tokens after a query and each of several items."
    operation = Operation(summary, LabelScores, GenerativeScoringRequest, GENERATIVE_SCORING)

    @routes.post("/generative_scoring", openapi_extra=operation)
    async def score_labels(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse(body, GenerativeScoringRequest, has_own_names=True))
        caller = caller_of(http)
        model = service.names.check(request.model, caller)
        request.check(service.vocab_size)
        client_id = f"generative-scoring-{name_of(request.request_id, http) or secrets.token_hex(12)}"
        ask = LabelInput(
            query=request.query,
            items=request.items,
            token_ids=request.labels,
            is_among_all=not request.apply_softmax,
            item_first=request.item_first,
            special=request.add_special_tokens,
            cache_salt=request.cache_salt,
            variant=service.names.lora_of(model, caller),
            priority=request.priority or 0,
            session=caller.session,
            client_id=client_id,
            received_s=received_s,
            caller=caller,
        )
        generations = await service.label_scorer.generations(ask)

        def answer(vectors: list[PooledOutput]) -> LabelScores:
            found = service.label_scorer.probabilities(ask, vectors)
            data = [LabelScore("score", at, each[0], each) for at, each in enumerate(found)]
            return LabelScores(client_id, "list", int(time.time()), model, data, pooling_usage(generations))

        return await answer_pooled(http, service, generations, answer)
