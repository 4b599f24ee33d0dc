"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.http import (
    CLIENT_CLOSED_REQUEST,
    DONE,
    EventStream,
    chain,
    error_body,
    event,
    json_response,
    read_body,
    unless_disconnected,
)
from pd_cluster.api.logprobs import LogprobsFormat, prompt_entries
from pd_cluster.api.parse import parse
from pd_cluster.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from pd_cluster.api.sequence import Piece, TokenLogprobs
from pd_cluster.api.service import Generation, TextService
from pd_cluster.errors import PdClusterError, RequestError
from pd_cluster.text import Tokenizer

SESSION_HEADER = "x-session-id"


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
        answer = ChatAnswer(request, service.check_model(request.model), service.tokenizer)
        return await _answer(http, service, answer, await service.chat(request))

    @routes.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(http: Request) -> Response:
        request = parse(await read_body(http), CompletionRequest)
        name = service.check_model(request.model)
        prompt = _one_prompt(request.prompt)
        generation = await service.completion(request, prompt, request.add_special_tokens)
        echoed = ""
        if request.echo:
            is_whole = isinstance(prompt, str) and request.truncate_prompt_tokens is None
            echoed = str(prompt) if is_whole else service.tokenizer.decode(generation.prompt_token_ids)
        return await _answer(http, service, CompletionAnswer(request, name, service.tokenizer, echoed), generation)

    return routes


class Answer(ABC):
    """The shapes of one endpoint: id, time and model are the same in every chunk."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, request: GenerationRequest, model: str, tokenizer: Tokenizer) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._format = LogprobsFormat(tokenizer, bool(request.return_tokens_as_token_ids))
        self._of_prompt: list[dict[str, Any] | None] | None = None  # the same for every choice
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, pieces: list[Piece], generation: Generation) -> dict[str, Any]:
        choices = [self._whole_choice(piece, generation) for piece in pieces]
        return {**self._head(self.object), "choices": choices, "usage": generation.usage}

    def _whole_choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        ids = {"prompt_token_ids": generation.prompt_token_ids} if self.request.return_token_ids else {}
        logprobs = self._logprobs(piece.logprobs, generation)
        return self._choice(piece.index, self._whole(piece.text), logprobs, piece.token_ids, piece.finish_reason) | ids

    @property
    def has_logprobs(self) -> bool:
        return self.request.num_logprobs is not None or self.request.prompt_logprobs is not None

    @property
    def shows_every_token(self) -> bool:
        """Whether a chunk without text can have something to show."""
        return self.request.return_token_ids or self.request.num_logprobs is not None

    def chunk(self, piece: Piece) -> bytes:
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        return self._chunk(self._choice(piece.index, self._delta(piece.text), logprobs, piece.token_ids))

    def last_chunk(self, piece: Piece) -> bytes:
        return self._chunk(self._choice(piece.index, self._no_delta(), finish_reason=piece.finish_reason))

    def usage_chunk(self, generation: Generation) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": generation.usage})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.request.include_usage else {}
        return event({**self._head(self.chunk_object), "choices": [choice], **usage})

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        ids = {"token_ids": token_ids} if self.request.return_token_ids and token_ids is not None else {}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **ids}

    @abstractmethod
    def opening(self, index: int, generation: Generation) -> bytes:
        """A choice's chunk before its first text, if any."""

    @abstractmethod
    def _logprobs(self, entries: list[TokenLogprobs], whole: Generation | None = None) -> dict[str, Any] | None:
        """As part of a choice; of the whole answer when a generation is given."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """All text as part of the answer's choice."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """New text as part of a chunk's choice."""

    @abstractmethod
    def _no_delta(self) -> dict[str, Any]:
        """The same for the chunk that carries the finish_reason."""

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any]:
        if self.request.prompt_logprobs is None:
            return {}
        if self._of_prompt is None:
            self._of_prompt = self._format.prompt(generation.prompt_token_ids, generation.prompt_logprobs)
        return {"prompt_logprobs": self._of_prompt}


class ChatAnswer(Answer):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, pieces: list[Piece], generation: Generation) -> dict[str, Any]:
        return super().whole(pieces, generation) | self._prompt_logprobs(generation)

    def opening(self, index: int, generation: Generation) -> bytes:
        return self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}))

    def _logprobs(self, entries: list[TokenLogprobs], whole: Generation | None = None) -> dict[str, Any] | None:
        return None if self.request.num_logprobs is None else self._format.chat(entries)

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _no_delta(self) -> dict[str, Any]:
        return {"delta": {}}


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer, echoed: str) -> None:
        super().__init__(request, model, tokenizer)
        self._echo = request.echo
        self._echoed = echoed
        self._echoed_logprobs: list[TokenLogprobs] | None = None

    def opening(self, index: int, generation: Generation) -> bytes:
        if not self._echoed:
            return b""
        logprobs = None if self.request.num_logprobs is None else self._format.completion(self._prompt(generation))
        return self._chunk(self._choice(index, {"text": self._echoed}, logprobs))

    def _whole_choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        return super()._whole_choice(piece, generation) | self._prompt_logprobs(generation)

    def _logprobs(self, entries: list[TokenLogprobs], whole: Generation | None = None) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        shifted = [entry._replace(text_offset=entry.text_offset + len(self._echoed)) for entry in entries]
        return self._format.completion([*(self._prompt(whole) if whole is not None else []), *shifted])

    def _prompt(self, generation: Generation) -> list[TokenLogprobs]:
        """The prompt's own logprobs, as far as they are echoed."""
        if not self._echo:
            return []
        if self._echoed_logprobs is None:
            ids, found = generation.prompt_token_ids, generation.prompt_logprobs
            self._echoed_logprobs = prompt_entries(self._tokenizer, ids, found)
        return self._echoed_logprobs

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": self._echoed + text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _no_delta(self) -> dict[str, Any]:
        return {"text": ""}


async def _answer(http: Request, service: TextService, answer: Answer, generation: Generation) -> Response:
    generation.client_id = answer.id
    generation.session = generation.session or http.headers.get(SESSION_HEADER, "")
    if not answer.request.stream:
        pieces = await unless_disconnected(http, service.complete(generation))
        if pieces is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return await json_response(
            lambda: answer.whole(pieces, generation), large=answer.has_logprobs, headers=served_by(generation)
        )
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
    yield (answer.usage_chunk(generation) if answer.request.include_usage else b"") + DONE


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
