"""vLLM's plain API (`USE_OPENAI=0`): POST /generate. Answers begin with the prompt; stream frames are cumulative."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pd_cluster.api.http import CLIENT_CLOSED_REQUEST, EventStream, chain, error_body, read_body, unless_disconnected
from pd_cluster.api.protocol import GenerateRequest, parse
from pd_cluster.api.service import Generation, TextService
from pd_cluster.errors import PdClusterError


def legacy_routes(service: TextService) -> APIRouter:
    routes = APIRouter()

    @routes.post("/generate")
    async def generate(http: Request) -> Response:
        request = parse(await read_body(http), GenerateRequest)
        generation = await service.completion(request, request.prompt)
        prompt = request.prompt if isinstance(request.prompt, str) else service.tokenizer.decode(request.prompt)
        if request.stream:
            frames = _frames(service, generation, prompt)
            first = await unless_disconnected(http, anext(frames))
            if first is None:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return EventStream(chain(first, frames), media_type="application/json")
        whole = await unless_disconnected(http, service.complete(generation))
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse({"text": [prompt + whole.text]})

    return routes


async def _frames(service: TextService, generation: Generation, prompt: str) -> AsyncGenerator[bytes, None]:
    """`{"text": [prompt + output so far]}` and a NUL, whenever there is more."""
    text = prompt
    try:
        async with contextlib.aclosing(service.stream(generation)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                text += piece.text
                yield msgspec.json.encode({"text": [text]}) + b"\0"
    except PdClusterError as error:
        if text == prompt:  # nothing was sent: it becomes an HTTP status
            raise
        yield msgspec.json.encode(error_body(error)) + b"\0"
