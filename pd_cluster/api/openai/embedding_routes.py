"""Routes whose prompts become vectors: /v1/embeddings, and /score and /rerank by the vectors' directions.

Prefill instances compute them; no decode leg is taken.
"""

from __future__ import annotations

import base64
import time
from array import array
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.gate.callers import caller_of, reserve_tokens
from pd_cluster.api.gate.http import GeneratingRoute, json_response, read_body, unless_disconnected
from pd_cluster.api.openai.openai import served_by
from pd_cluster.api.openai.request_names import name_for
from pd_cluster.service.embedding import Embedding, EmbeddingAsk
from pd_cluster.service.generation import Generation
from pd_cluster.service.merge import together
from pd_cluster.service.schema.embedding_protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pd_cluster.service.schema.parse import parse
from pd_cluster.service.service import TextService
from pd_cluster.service.status import CLIENT_CLOSED_REQUEST

PoolingT = TypeVar("PoolingT", bound=PoolingRequest)
LARGE = 64  # vectors: more are written on a thread


def embedding_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)

    @routes.post("/v1/embeddings")
    async def embeddings(http: Request) -> Response:
        job = Job(service, http)
        return await _embeddings(job, job.checked(parse(await read_body(http), EmbeddingRequest)))

    @routes.post("/score")
    @routes.post("/v1/score")
    async def score(http: Request) -> Response:
        job = Job(service, http)
        return await _score(job, job.checked(parse(await read_body(http), ScoreRequest)))

    @routes.post("/rerank")
    @routes.post("/v1/rerank")
    @routes.post("/v2/rerank")
    async def rerank(http: Request) -> Response:
        job = Job(service, http)
        return await _rerank(job, job.checked(parse(await read_body(http), RerankRequest)))

    return routes


async def _embeddings(job: Job, request: EmbeddingRequest) -> Response:
    normalizes = request.normalize is not False
    found = await job.embeddings(request, request.inputs(), "input", "embd", request.dimensions, normalizes)
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    in_base64 = request.encoding_format == "base64"

    def answer() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": at, "embedding": in_text(each.values) if in_base64 else each.values}
            for at, each in enumerate(found)
        ]
        return {**job.head(), "data": data, "usage": usage_of(found)}

    return await json_response(answer, large=len(found) > LARGE, headers=job.headers)


async def _score(job: Job, request: ScoreRequest) -> Response:
    pairs = request.pairs()
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    found = await job.embeddings(request, texts, "text_1", "score")
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    vectors = dict(zip(texts, found, strict=True))

    def answer() -> dict[str, Any]:
        data = [
            {"index": at, "object": "score", "score": cosine(vectors[first], vectors[second])}
            for at, (first, second) in enumerate(pairs)
        ]
        return {**job.head(), "data": data, "usage": usage_of(found)}

    return await json_response(answer, large=len(found) > LARGE, headers=job.headers)


async def _rerank(job: Job, request: RerankRequest) -> Response:
    documents = request.checked_documents()
    found = await job.embeddings(request, [request.query, *documents], "documents", "rerank")
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    shows = request.return_documents is not False

    def answer() -> dict[str, Any]:
        query, *others = found
        scores = [cosine(query, other) for other in others]
        best = sorted(range(len(documents)), key=lambda at: -scores[at])[: request.top_n or None]
        results = [
            {"index": at, "relevance_score": scores[at]} | ({"document": {"text": documents[at]}} if shows else {})
            for at in best
        ]
        used = {"total_tokens": usage_of(found)["total_tokens"]}
        return {"id": job.id, "model": job.name, "results": results, "usage": used}

    return await json_response(answer, large=len(found) > LARGE, headers=job.headers)


class Job:
    """The prompts of one request, from their texts to their vectors."""

    def __init__(self, service: TextService, http: Request) -> None:
        self._service, self._http = service, http
        self._received_s = time.monotonic()
        self._generations: list[Generation] = []
        self.id = self.name = ""

    def checked(self, request: PoolingT) -> PoolingT:
        """Notes the model's name for the answer. Raises ModelNotFound, RequestError."""
        self.name = self._service.check_model(request.model, caller_of(self._http))
        self._service.check_priority(request.priority)
        return request

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "list", "created": int(time.time()), "model": self.name}

    @property
    def headers(self) -> dict[str, str]:
        return served_by(self._generations)

    async def embeddings(
        self,
        request: PoolingRequest,
        prompts: list[Any],
        place: str,
        prefix: str,
        dimensions: int | None = None,
        normalizes: bool = True,
    ) -> list[Embedding] | None:
        """Returns the vectors in the order of the prompts, or None if the client has left. `place` names them."""
        embedder, caller = self._service.embedder, caller_of(self._http)
        self.id = f"{prefix}-{name_for(request.request_id, self._http)}"
        asks = [
            EmbeddingAsk(
                prompt=prompt,
                place=place,
                dimensions=dimensions,
                normalizes=normalizes,
                truncate_prompt_tokens=request.truncate_prompt_tokens,
                special=request.add_special_tokens is not False,
                cache_salt=request.cache_salt,
                priority=request.priority or 0,
                client_id=self.id,
                received_s=self._received_s,
                caller=caller,
            )
            for prompt in prompts
        ]
        self._generations = [await embedder.prepare(ask) for ask in asks]
        reserve_tokens(self._http, self._generations)
        works = [embedder.pooled(generation) for generation in self._generations]
        return await unless_disconnected(self._http.receive, together(works))


def usage_of(found: list[Embedding]) -> dict[str, Any]:
    num_tokens = sum(len(each.prompt_token_ids) for each in found)
    cached = {"cached_tokens": sum(each.num_cached_tokens for each in found)}
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "prompt_tokens_details": cached}


def in_text(values: list[float]) -> str:
    """Returns float32 numbers, least significant byte first, in base64."""
    numbers = array("f", values)
    return base64.b64encode(numbers.tobytes()).decode()


def cosine(one: Embedding, other: Embedding) -> float:
    """Returns the cosine of the angle between two vectors of length 1."""
    return sum(a * b for a, b in zip(one.values, other.values, strict=True))
