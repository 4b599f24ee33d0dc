"""Routes for external routers and frameworks: tokens in and out, rendered prompts, batches of chats, /invocations.

Requests that consist of tokens use neither a template nor text.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from pd_cluster.api.middleware.direct_routes import GeneratingRoute, PlainRoute
from pd_cluster.api.middleware.http_bodies import (
    BODY,
    json_response,
    read_body,
    read_request,
    unless_disconnected,
)
from pd_cluster.api.middleware.http_callers import caller_of, reserve_tokens
from pd_cluster.api.openapi import request_examples
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.routes.load_header import load_header
from pd_cluster.api.routes.openai_routes import answered, openai_routes, served_by
from pd_cluster.api.routes.pooling.score_routes import Reranked, Scores, score_routes
from pd_cluster.api.routes.pooling.vector_routes import Embeddings, vector_routes
from pd_cluster.api.routes.request_names import named
from pd_cluster.errors import RequestError
from pd_cluster.service.answers.chat_answer import ChatAnswer, ChatCompletion, ChatCompletionChunk
from pd_cluster.service.answers.completion_answer import Completion, CompletionChunk
from pd_cluster.service.answers.tokens_answer import GeneratedTokens, GeneratedTokensChunk, TokensAnswer
from pd_cluster.service.generation.prompt_generation import Generation, added_up
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest, TokensCompletionRequest
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST
from pd_cluster.service.schema.error_field_names import with_field_names
from pd_cluster.service.schema.pooling.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from pd_cluster.service.schema.request_parsing import HANDLE, parse
from pd_cluster.service.schema.tokens.tokens_protocol import (
    NAMES,
    BatchChatRequest,
    TokensRequest,
)
from pd_cluster.service.text_service import TextService

NUM_CHATS_A_TURN = 16  # chats of a batch to prepare before other tasks run
FEW_CHATS = 4  # larger answers are built on a thread


class _Kinds(msgspec.Struct):
    """The fields of a body that identify its route."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()


INVOKED = {  # the route for a body that has this field
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/rerank",
    "queries": "/score",
    "text_1": "/score",
    "data_1": "/score",
}


def inference_routes(service: TextService) -> APIRouter:
    routes, vocab_size = APIRouter(route_class=GeneratingRoute), service.vocab_size
    of_tokens = Operation("Tokens in, tokens out.", GeneratedTokens, TokensRequest, request_examples.TOKENS)
    of_chats = "Answer several conversations, with a choice for each."

    @routes.post("/inference/v1/generate", openapi_extra=of_tokens.chunks(GeneratedTokensChunk))
    async def generate_tokens(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, _completion_of)
        name = service.names.check(request.model, caller_of(http))
        if request.output_mode == "text" and not service.tokenizer.has_text:
            raise RequestError('output_mode: "text" needs a tokenizer (--skip-tokenizer-init)', param="output_mode")
        with with_field_names(NAMES):
            generations = await service.completions(named(request, http), received_s, caller_of(http))
        return await answered(http, service, TokensAnswer(request, name, service, generations))

    @routes.post(
        "/v1/chat/completions/batch",
        openapi_extra=Operation(of_chats, ChatCompletion, BatchChatRequest, request_examples.BATCH),
    )
    async def chat_batch(http: Request) -> Response:
        received_s = time.monotonic()
        request = await read_request(http, lambda body: parse(body, BatchChatRequest, vocab_size=vocab_size))
        name = service.names.check(request.model, caller_of(http))
        chats = _Chats([], [])
        for at, each in enumerate(request.chats()):
            with with_field_names({"messages": f"messages[{at}]"}):
                generation = await service.chat(named(each, http), received_s, caller_of(http))
            chats.generations.append(generation)
            chats.answers.append(ChatAnswer(each, name, service, generation))
            if at % NUM_CHATS_A_TURN == 0:
                await asyncio.sleep(0)
        return await _answered_batch(http, service, chats)

    _add_invocations(routes, service)
    return routes


def _completion_of(body: bytes) -> TokensCompletionRequest:
    return parse(body, TokensRequest, takes=(HANDLE,)).completion()


class _Chats(NamedTuple):
    """A batch of conversations."""

    generations: list[Generation]
    answers: list[ChatAnswer]

    def whole(self, pieces: list[Piece]) -> ChatCompletion:
        """Returns one answer, with a choice for each conversation, in order."""
        wholes = [answer.whole([piece]) for answer, piece in zip(self.answers, pieces, strict=True)]
        return msgspec.structs.replace(
            wholes[0],
            choices=[msgspec.structs.replace(each.choices[0], index=at) for at, each in enumerate(wholes)],
            usage=added_up([each.usage for each in wholes]),
            metrics=UNSET if wholes[0].metrics is UNSET else None,
            prompt_token_ids=None,
        )


async def _answered_batch(http: Request, service: TextService, chats: _Chats) -> Response:
    reserve_tokens(http, chats.generations)
    for generation in chats.generations:
        generation.client_id = chats.answers[0].id
    pieces = await unless_disconnected(http.receive, service.complete(chats.generations))
    if pieces is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    large = len(chats.generations) > FEW_CHATS or chats.answers[0].is_large
    headers = served_by(chats.generations) | load_header(http, service)
    return await json_response(lambda: chats.whole(pieces), large=large, headers=headers)


def _add_invocations(routes: APIRouter, service: TextService) -> None:
    """Adds SageMaker's route, which passes a body to the route that its fields identify."""
    known = [*openai_routes(service).routes, *vector_routes(service).routes, *score_routes(service).routes]
    endpoints = {route.path: route.endpoint for route in known if isinstance(route, PlainRoute)}

    operation = Operation(
        "Answer a body of any of these requests.",
        (ChatCompletion, Completion, Embeddings, Reranked, Scores),
        (ChatCompletionRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
        request_examples.INVOCATION,
    )

    @routes.post("/invocations", openapi_extra=operation.chunks((ChatCompletionChunk, CompletionChunk)))
    async def invocations(http: Request) -> Response:
        body = await read_body(http)
        field = _field_of(body)
        http.scope[BODY] = body
        found: Response = await endpoints[INVOKED[field]](http)
        return found


def _field_of(body: bytes) -> str:
    """Returns the field that identifies the route. Raises RequestError unless the body has one."""
    try:
        form = msgspec.json.decode(body, type=_Kinds)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "messages"
    found = next((name for name in INVOKED if getattr(form, name)), None)
    if found is None:
        raise RequestError(f"the body has none of {', '.join(INVOKED)}; give one of them")
    return found
