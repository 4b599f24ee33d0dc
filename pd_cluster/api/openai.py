"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pd_cluster.api.http import (
    CLIENT_CLOSED_REQUEST,
    DONE,
    EventStream,
    error_body,
    event,
    read_body,
    unless_disconnected,
)
from pd_cluster.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, parse
from pd_cluster.api.service import Generation, TextService
from pd_cluster.errors import PdClusterError, RequestError


def openai_routes(service: TextService) -> APIRouter:
    routes = APIRouter()
    created = int(time.time())

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {
            "object": "model",
            "created": created,
            "owned_by": "pd-cluster",
            "root": service.model,
            "max_model_len": service.max_model_len,
        }
        return {"object": "list", "data": [{"id": name, **entry} for name in service.served_model_names]}

    @routes.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest))
    async def chat(http: Request) -> Response:
        request = parse(await read_body(http), ChatCompletionRequest)
        answer = ChatAnswer(request, service.check_model(request.model))
        return await _answer(http, service, answer, service.chat(request))

    @routes.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(http: Request) -> Response:
        request = parse(await read_body(http), CompletionRequest)
        name = service.check_model(request.model)
        prompt = _one_prompt(request.prompt)
        generation = service.completion(request, prompt, request.add_special_tokens)
        echoed = ""
        if request.echo:
            echoed = prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)
        return await _answer(http, service, CompletionAnswer(request, name, echoed), generation)

    return routes


class Answer(ABC):
    """The shapes of one endpoint: id, time and model are the same in every chunk."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, request: GenerationRequest, model: str) -> None:
        self.request = request
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        choice = {
            **self._choice(text),
            "index": 0,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
        }
        return {**self._head(self.object), "choices": [choice], "usage": generation.usage}

    def chunk(self, content: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {**content, "index": 0, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.request.include_usage else {}
        return event({**self._head(self.chunk_object), "choices": [choice], **usage})

    def usage_chunk(self, generation: Generation) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": generation.usage})

    @abstractmethod
    def first(self) -> list[bytes]:
        """Chunks before the first text."""

    @abstractmethod
    def piece(self, text: str) -> dict[str, Any]:
        """New text as part of a chunk's choice."""

    @abstractmethod
    def _choice(self, text: str) -> dict[str, Any]:
        """All text as part of the answer's choice."""


class ChatAnswer(Answer):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> list[bytes]:
        return [self.chunk({"delta": {"role": "assistant", "content": ""}})]

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, model: str, echoed: str) -> None:
        super().__init__(request, model)
        self._echoed = echoed

    def first(self) -> list[bytes]:
        return [self.chunk({"text": self._echoed})] if self._echoed else []

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": self._echoed + text}

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}


async def _answer(http: Request, service: TextService, answer: Answer, generation: Generation) -> Response:
    if not answer.request.stream:
        text = await unless_disconnected(http, service.complete(generation))
        if text is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer.whole(text, generation), headers=served_by(generation))
    events = _events(service, answer, generation)
    # Whatever cannot be served at all becomes an HTTP status, not a broken stream.
    first = await unless_disconnected(http, anext(events))
    if first is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(_chain(first, events), headers=served_by(generation))


async def _events(service: TextService, answer: Answer, generation: Generation) -> AsyncGenerator[bytes, None]:
    """All server-sent events of a request. An error before the first text is raised, a later one is in-band."""
    begun = False
    try:
        async with contextlib.aclosing(service.stream(generation)) as pieces:  # type: ignore[type-var]
            async for text in pieces:
                head = b"" if begun else b"".join(answer.first())
                begun = True
                yield head + answer.chunk(answer.piece(text))
    except PdClusterError as error:
        if not begun:
            raise
        yield event(error_body(error)) + DONE
        return
    head = b"" if begun else b"".join(answer.first())
    tail = answer.chunk(answer.piece(""), generation.finish_reason)
    if answer.request.include_usage:
        tail += answer.usage_chunk(generation)
    yield head + tail + DONE


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for item in rest:
            yield item


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


def _body_of(kind: type[GenerationRequest]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
