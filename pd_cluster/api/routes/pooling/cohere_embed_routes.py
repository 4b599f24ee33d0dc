"""Cohere's /v2/embed: vectors of texts in up to four forms."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import COHERE_EMBED
from pd_cluster.api.routes.pooling.pooled_answers import answer_pooled, pooling_usage
from pd_cluster.api.routes.request_names import name_of
from pd_cluster.errors import GenerationError, RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.pooling.embedder import EmbeddingInput
from pd_cluster.service.pooling.pooled_prompts import numbers_of
from pd_cluster.service.schema.pooling.cohere_embed_protocol import CohereEmbedRequest
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.text_service import TextService
from pd_cluster.types import PooledOutput


class CohereVectors(Struct, omit_defaults=True, rename={"floats": "float"}):
    floats: Annotated[list[list[float]] | None, Meta(description="Each text's vector.")] = None
    binary: Annotated[list[list[int]] | None, Meta(description="Signs, eight in a number from -128 to 127.")] = None
    ubinary: Annotated[list[list[int]] | None, Meta(description="Signs, eight in a byte, 0 to 255.")] = None
    base64: Annotated[list[str] | None, Meta(description="The vectors' float32 bytes, little endian.")] = None


class CohereVersion(Struct):
    version: Literal["2"]


class CohereBilled(Struct):
    input_tokens: int


class CohereMeta(Struct):
    api_version: CohereVersion
    billed_units: CohereBilled


class CohereEmbeddings(Struct, omit_defaults=True):
    id: str
    embeddings: CohereVectors
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]
    texts: list[str] | None = None


def cohere_embed_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    operation = Operation("Embed texts, with Cohere's API.", CohereEmbeddings, CohereEmbedRequest, COHERE_EMBED)

    @routes.post("/v2/embed", openapi_extra=operation)
    async def embed(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse(body, CohereEmbedRequest, has_own_names=True))
        model = service.names.check(request.model, caller_of(http))
        variant = service.names.lora_of(model, caller_of(http))
        client_id = f"embd-{name_of(None, http) or secrets.token_hex(12)}"
        field, texts = request.given()
        keep = _kept(request, service.max_model_len)
        prefix = service.embedder.prompts.of(request.input_type)
        caller = caller_of(http)
        generations = await service.embedder.generations(
            [
                EmbeddingInput(
                    prompt=prefix + text,
                    dimensions=request.output_dimension,
                    keeps_first=request.truncate == "END",
                    field=f"{field}[{at}]",
                    truncate_prompt_tokens=keep,
                    cache_salt=request.cache_salt,
                    variant=variant,
                    priority=request.priority or 0,
                    session=caller.session,
                    client_id=client_id,
                    received_s=received_s,
                    caller=caller,
                )
                for at, text in enumerate(texts)
            ]
        )
        _check_length(request, generations)

        def answer(vectors: list[PooledOutput]) -> CohereEmbeddings:
            meta = CohereMeta(CohereVersion("2"), CohereBilled(pooling_usage(generations).prompt_tokens))
            forms = request.embedding_types or ["float"]
            shown = _in_forms([numbers_of(each.vector, request.output_dimension) for each in vectors], forms)
            return CohereEmbeddings(client_id, shown, meta, "embeddings_by_type", request.texts)

        return await answer_pooled(http, service, generations, answer)

    return routes


def _kept(request: CohereEmbedRequest, limit: int) -> int | None:
    """Returns the most tokens to keep of a text; -1: as many as fit the context; None: texts are not truncated."""
    if request.truncate == "NONE":
        return None
    return -1 if request.max_tokens is None else min(request.max_tokens, limit)


def _check_length(request: CohereEmbedRequest, generations: Sequence[Generation]) -> None:
    """Raises RequestError for a text of more than max_tokens that must not be truncated."""
    longest = max(len(each.prompt_token_ids) for each in generations)
    if request.truncate == "NONE" and request.max_tokens is not None and longest > request.max_tokens:
        raise RequestError(
            f"max_tokens: a text has {longest} tokens, more than {request.max_tokens}; send less, or truncate START or "
            f"END",
            param="max_tokens",
        )


def _in_forms(vectors: list[list[float]], forms: Sequence[str]) -> CohereVectors:
    """Raises GenerationError for signs of a vector whose size is not a multiple of 8."""
    found = CohereVectors()
    if "float" in forms:
        found.floats = vectors
    if "base64" in forms:
        found.base64 = [base64.b64encode(_bytes_of(each)).decode() for each in vectors]
    if "ubinary" in forms or "binary" in forms:
        signs = [_signs(each) for each in vectors]
        found.ubinary = signs if "ubinary" in forms else None
        found.binary = [[each - 128 for each in row] for row in signs] if "binary" in forms else None
    return found


def _bytes_of(vector: list[float]) -> bytes:
    return struct.pack(f"<{len(vector)}f", *vector)


def _signs(vector: list[float]) -> list[int]:
    """Returns sign bits, eight to a byte, the first one highest; a bit is set unless the value is negative."""
    if len(vector) % 8:
        raise GenerationError(f"binary: the vectors have {len(vector)} numbers, and signs need a multiple of 8")
    bits = "".join("1" if number >= 0 else "0" for number in vector)
    return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
