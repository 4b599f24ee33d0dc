"""vLLM's plain API (`USE_OPENAI=0`): POST /generate. Answers begin with the prompt; stream frames are cumulative."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import EventStream, json_response, read_request, unless_disconnected
from pd_cluster.api.middleware.http_callers import caller_of, reserve_tokens
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import GENERATE
from pd_cluster.api.routes.request_names import named
from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.answer_logprobs import CompletionLogprobs, LogprobsFormat, behind
from pd_cluster.service.answers.openai_answer import OfPrompt
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece, joined
from pd_cluster.service.preprocessing.request_limits import check_streamed_texts
from pd_cluster.service.schema.completion_protocol import GenerateRequest
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST, error_body
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.text_service import TextService

STREAMED = "The texts. With `stream`, such an object and a NUL for each new piece of text."


class Generated(msgspec.Struct, omit_defaults=True):
    """The answer. In a stream, each frame has the whole text so far, and the last frame the logprobs and ids."""

    text: Annotated[list[str], Meta(description="For each sequence, the prompt and the output.")]
    token_ids: Annotated[list[list[int]] | None, Meta(description="For each sequence, the output's ids.")] = None
    prompt_token_ids: list[int] | None = None
    logprobs: list[CompletionLogprobs] | None = None
    prompt_logprobs: OfPrompt = None


def legacy_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    takes = Operation("Continue a text.", Generated, GenerateRequest, GENERATE)

    @routes.post("/generate", openapi_extra=takes.says(STREAMED))
    async def generate(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse(body, GenerateRequest, vocab_size=service.vocab_size))
        service.names.check_use(caller_of(http))
        if not service.max_loras:
            request.model = None  # any name selects the served model
        generation = await service.completion(request, request.prompt, received_s=received_s, caller=caller_of(http))
        reserve_tokens(http, [generation])
        name = named(request, http).request_id
        generation.client_id = f"generate-{name or secrets.token_hex(12)}"
        headers = {"x-request-id": generation.client_id}  # the answer's body has no field for it
        is_whole = isinstance(request.prompt, str) and request.truncate_prompt_tokens is None
        prompt = str(request.prompt) if is_whole else generation.prompt_text
        if request.stream:
            check_streamed_texts(len(generation.sequences), len(prompt), generation.sampling.max_tokens)
            frames = _frames(service, request, generation, prompt)
            return EventStream(frames, headers=headers, media_type="application/json")
        pieces = await unless_disconnected(http.receive, service.complete([generation]))
        if pieces is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return await json_response(
            lambda: _whole(service, request, generation, prompt, pieces),
            large=request.logprobs is not None or request.prompt_logprobs is not None,
            headers=headers,
        )

    return routes


async def _frames(
    service: TextService, request: GenerateRequest, generation: Generation, prompt: str
) -> AsyncGenerator[bytes, None]:
    """Yields `{"text": [prompt + output so far, …]}` and a NUL for each update.

    The last frame also has the other fields.
    """
    pieces: list[list[Piece]] = [[] for _ in generation.sequences]
    texts = [prompt for _ in generation.sequences]
    begun = False
    try:
        async with contextlib.aclosing(service.stream(generation)) as stream:
            async for piece in stream:
                texts[piece.index] += piece.text
                pieces[piece.index].append(piece)
                frame = Generated(texts)
                if all(sequence.finish_reason is not None for sequence in generation.sequences):
                    frame = _whole(service, request, generation, prompt, [joined(each) for each in pieces])
                begun = True
                yield msgspec.json.encode(frame) + b"\0"
    except PdClusterError as error:
        if not begun:  # nothing was sent yet, so the error becomes an HTTP status
            raise
        yield msgspec.json.encode(error_body(error)) + b"\0"


def _whole(
    service: TextService, request: GenerateRequest, generation: Generation, prompt: str, pieces: list[Piece]
) -> Generated:
    """Returns the texts, and the requested extras in the format of /v1/completions."""
    as_ids = request.return_tokens_as_token_ids
    form = LogprobsFormat(service.tokenizer, service.shows_token_ids if as_ids is None else as_ids)
    answer = Generated([prompt + piece.text for piece in pieces])
    if request.return_token_ids:
        answer.token_ids = [piece.token_ids for piece in pieces]
        answer.prompt_token_ids = generation.prompt_token_ids
    if request.logprobs is not None:
        answer.logprobs = [form.completion(behind(piece.logprobs, len(prompt))) for piece in pieces]
    if request.prompt_logprobs is not None:
        answer.prompt_logprobs = form.prompt(generation.prompt_token_ids, generation.prompt_logprobs)
    return answer
