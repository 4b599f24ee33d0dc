"""OpenAI's routes that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.answers import Answer, ChatAnswer, CompletionAnswer
from pd_cluster.api.chat_protocol import ChatCompletionRequest
from pd_cluster.api.http import (
    CLIENT_CLOSED_REQUEST,
    DONE,
    EventStream,
    PlainRoute,
    error_body,
    event,
    json_response,
    read_body,
    session_of,
    unless_disconnected,
)
from pd_cluster.api.parse import parse
from pd_cluster.api.protocol import CompletionRequest
from pd_cluster.api.service import Generation, TextService
from pd_cluster.errors import PdClusterError, RequestError


def openai_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)

    @routes.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        received_s = time.monotonic()
        request = parse(await read_body(http), ChatCompletionRequest)
        answer = ChatAnswer(request, service.check_model(request.model), service.tokenizer)
        return await _answer(http, service, answer, await service.chat(request, received_s))

    @routes.post("/v1/completions")
    async def completions(http: Request) -> Response:
        received_s = time.monotonic()
        request = parse(await read_body(http), CompletionRequest)
        name = service.check_model(request.model)
        prompt = _one_prompt(request.prompt)
        generation = await service.completion(request, prompt, request.add_special_tokens, received_s)
        echoed = ""
        if request.echo:
            is_whole = isinstance(prompt, str) and request.truncate_prompt_tokens is None
            echoed = str(prompt) if is_whole else service.tokenizer.decode(generation.prompt_token_ids)
        return await _answer(http, service, CompletionAnswer(request, name, service.tokenizer, echoed), generation)

    return routes


async def _answer(http: Request, service: TextService, answer: Answer, generation: Generation) -> Response:
    generation.client_id = answer.id
    generation.session = generation.session or session_of(http)
    if not answer.wanted.stream:
        pieces = await unless_disconnected(http.receive, service.complete(generation))
        if pieces is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return await json_response(
            lambda: answer.whole(pieces, generation), large=answer.has_logprobs, headers=served_by(generation)
        )
    return EventStream(_events(service, answer, generation), lambda: served_by(generation))


async def _events(service: TextService, answer: Answer, generation: Generation) -> AsyncGenerator[bytes, None]:
    """All server-sent events of a request. An error before the first text is raised, a later one is in-band."""
    begun = False
    try:
        async with contextlib.aclosing(service.stream(generation)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                events = b"" if begun else b"".join(answer.opening(s.index, generation) for s in generation.sequences)
                if piece.text or (answer.shows_every_token and piece.token_ids):
                    events += answer.chunk(piece)
                if piece.finish_reason is not None:
                    events += answer.last_chunk(piece)
                if events:
                    begun = True
                    yield events
    except PdClusterError as error:
        if not begun:
            raise
        yield event(error_body(error)) + DONE
        return
    yield (answer.usage_chunk(generation) if answer.wanted.usage else b"") + DONE


def served_by(generation: Generation) -> dict[str, str]:
    """Which instances did the work, for operators; clients ignore it."""
    return {"x-pd-served-by": ",".join(generation.served_by)} if generation.served_by else {}


def _one_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise RequestError("prompt: empty", param="prompt")
    if isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise RequestError(f"prompt: {len(prompt)} prompts in one request are not supported yet", param="prompt")
    return prompt[0]
