"""The common part of pooling routes: request terms, usage, and the answer after all prompts are computed."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from msgspec import Struct

from pd_cluster.api.middleware.http_bodies import json_response, unless_disconnected
from pd_cluster.api.middleware.http_callers import caller_of, reserve_tokens
from pd_cluster.api.routes.openai_routes import served_by
from pd_cluster.api.routes.request_names import name_of
from pd_cluster.service.generation.prompt_generation import Generation, PromptTokensDetails, usage_of
from pd_cluster.service.pooling.pooled_prompts import numbers_of
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST
from pd_cluster.service.schema.pooling.pooling_protocol import PoolingRequest
from pd_cluster.service.text_service import TextService
from pd_cluster.types import PooledOutput

FEW_NBYTES = 64 << 10  # larger answers are built on a thread


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


async def answer_pooled(
    http: Request,
    service: TextService,
    generations: list[Generation],
    answer: Callable[[list[PooledOutput]], msgspec.Struct],
    is_long: bool = False,
) -> Response:
    """Computes all prompts and answers, unless the client leaves. `is_long`: whether building the answer takes long."""
    reserve_tokens(http, generations)
    found = await unless_disconnected(http.receive, service.embedder.vectors(generations))
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    is_large = is_long or sum(len(each.vector) for each in found) > FEW_NBYTES
    return await json_response(lambda: answer(found), large=is_large, headers=served_by(generations))


def pooling_terms(
    prefix: str, request: PoolingRequest, http: Request, received_s: float, variant: str
) -> dict[str, Any]:
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


def pooling_usage(generations: list[Generation]) -> PoolingUsage:
    usage = usage_of(generations)
    assert usage.prompt_tokens_details is not None, "vectors come with their cached tokens"
    return PoolingUsage(usage.prompt_tokens, usage.total_tokens, usage.prompt_tokens_details)


def base64_of(vector: bytes, dimensions: int | None) -> str:
    numbers_of(vector, dimensions)  # raises for invalid bytes
    return base64.b64encode(vector).decode()
