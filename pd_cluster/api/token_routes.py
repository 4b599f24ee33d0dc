"""Text to token ids and back, as the served model has them: /tokenize and /detokenize. No instance takes part."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.api.caller import caller_of
from pd_cluster.api.chat_protocol import ChatFields
from pd_cluster.api.http import PlainRoute, json_response, read_body
from pd_cluster.api.parse import parse
from pd_cluster.api.protocol import Id
from pd_cluster.api.service import TextService
from pd_cluster.errors import RequestError

MAX_TOKENS = 1 << 18  # in a request to /detokenize: decoding them holds the interpreter
FEW_TOKENS = 4096  # more are put together on a thread


class TokenizeCompletionRequest(BaseModel):
    """A text as /v1/completions takes it."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """A conversation as /v1/chat/completions takes it."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    tokens: Annotated[list[Id], Field(max_length=MAX_TOKENS, fail_fast=True)]


class _Form(msgspec.Struct):
    """Enough of a body to see which of the two it is."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


def token_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)

    @routes.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        body = await read_body(http)
        request: TokenizeChatRequest | TokenizeCompletionRequest
        if _is_chat(body):
            request = parse(body, TokenizeChatRequest)
            service.check_model(request.model)
            token_ids = await service.chat_token_ids(request, may_be_cut=True, caller=caller_of(http))
        else:
            request = parse(body, TokenizeCompletionRequest)
            service.check_model(request.model)
            token_ids = await service.token_ids(
                request.prompt, request.add_special_tokens is not False, may_be_cut=True, caller=caller_of(http)
            )

        def answer() -> dict[str, Any]:
            strs = [_text(service, token_id) for token_id in token_ids] if request.return_token_strs else None
            most = service.max_model_len
            return {"count": len(token_ids), "max_model_len": most, "tokens": token_ids, "token_strs": strs}

        return await json_response(answer, large=len(token_ids) > FEW_TOKENS)

    @routes.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = parse(await read_body(http), DetokenizeRequest)
        service.check_model(request.model)
        largest = max(request.tokens, default=0)
        if largest >= service.vocab_size:
            raise RequestError(f"tokens: {largest}; ids must be in 0 to {service.vocab_size - 1}", param="tokens")
        if not service.tokenizer.has_text:
            raise RequestError("tokens: there is no tokenizer (--skip-tokenizer-init)", param="tokens")
        text = await service.text_of(request.tokens, caller_of(http))
        return await json_response(lambda: {"prompt": text}, large=len(request.tokens) > FEW_TOKENS)

    return routes


def _is_chat(body: bytes) -> bool:
    """Raises RequestError when it has both; what is no object is for `parse` to refuse."""
    try:
        form = msgspec.json.decode(body, type=_Form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if form.prompt and form.messages:
        raise RequestError("prompt: there are messages, too; give one of the two", param="prompt")
    return bool(form.messages)


def _text(service: TextService, token_id: int) -> str:
    """What the token stands for; bytes that are no character by themselves are shown as U+FFFD."""
    return service.tokenizer.token_bytes(token_id).decode(errors="replace")
