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
    chain,
    error_body,
    event,
    read_body,
    unless_disconnected,
)
from pd_cluster.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, parse
from pd_cluster.api.service import Generation, Piece, TextService
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
        return await _answer(http, service, answer, await service.chat(request))

    @routes.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(http: Request) -> Response:
        request = parse(await read_body(http), CompletionRequest)
        name = service.check_model(request.model)
        prompt = _one_prompt(request.prompt)
        generation = await service.completion(request, prompt, request.add_special_tokens)
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

    def whole(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        ids = {"prompt_token_ids": generation.prompt_token_ids} if self.request.return_token_ids else {}
        choice = self._choice(self._whole(piece.text), piece, generation.finish_reason) | ids
        return {**self._head(self.object), "choices": [choice], "usage": generation.usage}

    def chunk(self, piece: Piece) -> bytes:
        return self._chunk(self._choice(self._delta(piece.text), piece, None))

    def last_chunk(self, generation: Generation) -> bytes:
        return self._chunk(self._choice(self._no_delta(), None, generation.finish_reason))

    def usage_chunk(self, generation: Generation) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": generation.usage})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.request.include_usage else {}
        return event({**self._head(self.chunk_object), "choices": [choice], **usage})

    def _choice(self, content: dict[str, Any], piece: Piece | None, finish_reason: str | None) -> dict[str, Any]:
        ids = {"token_ids": piece.token_ids} if self.request.return_token_ids and piece is not None else {}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason, **ids}

    @abstractmethod
    def opening(self) -> bytes:
        """The chunk before the first text, if any."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """All text as part of the answer's choice."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """New text as part of a chunk's choice."""

    @abstractmethod
    def _no_delta(self) -> dict[str, Any]:
        """The same for the chunk that carries the finish_reason."""


class ChatAnswer(Answer):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        return self._chunk(self._choice({"delta": {"role": "assistant", "content": ""}}, None, None))

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _no_delta(self) -> dict[str, Any]:
        return {"delta": {}}


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, model: str, echoed: str) -> None:
        super().__init__(request, model)
        self._echoed = echoed

    def opening(self) -> bytes:
        return self._chunk(self._choice({"text": self._echoed}, None, None)) if self._echoed else b""

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": self._echoed + text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _no_delta(self) -> dict[str, Any]:
        return {"text": ""}


async def _answer(http: Request, service: TextService, answer: Answer, generation: Generation) -> Response:
    if not answer.request.stream:
        whole = await unless_disconnected(http, service.complete(generation))
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer.whole(whole, generation), headers=served_by(generation))
    events = _events(service, answer, generation)
    # Whatever cannot be served at all becomes an HTTP status, not a broken stream.
    first = await unless_disconnected(http, anext(events))
    if first is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(chain(first, events), headers=served_by(generation))


async def _events(service: TextService, answer: Answer, generation: Generation) -> AsyncGenerator[bytes, None]:
    """All server-sent events of a request. An error before the first text is raised, a later one is in-band."""
    begun = False
    try:
        async with contextlib.aclosing(service.stream(generation)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if piece.text or answer.request.return_token_ids:
                    head = b"" if begun else answer.opening()
                    begun = True
                    yield head + answer.chunk(piece)
    except PdClusterError as error:
        if not begun:
            raise
        yield event(error_body(error)) + DONE
        return
    head = b"" if begun else answer.opening()
    tail = answer.last_chunk(generation)
    if answer.request.include_usage:
        tail += answer.usage_chunk(generation)
    yield head + tail + DONE


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
