"""/tokenize and /detokenize: text to token ids and back, with the served model's tokenizer, without instances."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_bodies import LOOKING, json_of, json_response, read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import READ_FAILURES, Operation
from pd_cluster.api.openapi.request_examples import DETOKENIZE, TOKENIZE
from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatFields
from pd_cluster.service.schema.completion_protocol import Id
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.text_service import TextService
from pd_cluster.text.tokenizer import Tokenizer

MAX_TOKENS = 1 << 18  # maximum tokens of a request to /detokenize: decoding holds the interpreter's lock
FEW_TOKENS = 4096  # larger answers are built on a thread


class TokenizeCompletionRequest(BaseModel):
    """A text in the form of /v1/completions."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """A conversation in the form of /v1/chat/completions."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    tokens: Annotated[list[Id], Field(max_length=MAX_TOKENS, fail_fast=True)]


class Tokenized(msgspec.Struct, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Meta(description="Each token's text; U+FFFD for part of a character.")] = (
        None
    )


class Detokenized(msgspec.Struct):
    prompt: str


class _Form(msgspec.Struct):
    """The fields of a body that distinguish the two forms."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


def token_routes(service: TextService) -> APIRouter:
    routes, forms = APIRouter(route_class=PlainRoute), (TokenizeCompletionRequest, TokenizeChatRequest)
    encodes = "The token ids of a text, or of a conversation."
    decodes = "The text of token ids, special tokens included."

    @routes.post("/tokenize", openapi_extra=Operation(encodes, Tokenized, forms, TOKENIZE, READ_FAILURES))
    async def tokenize(http: Request) -> Response:
        request = await read_request(http, _tokenized)
        if isinstance(request, TokenizeChatRequest):
            service.names.check(request.model, caller_of(http))
            token_ids = await service.chat_token_ids(request, may_be_cut=True, caller=caller_of(http))
        else:
            service.names.check(request.model, caller_of(http))
            token_ids = await service.token_ids(
                request.prompt, request.add_special_tokens is not False, may_be_cut=True, caller=caller_of(http)
            )

        def answer() -> Tokenized:
            strs = [service.tokenizer.token_name(each) for each in token_ids] if request.return_token_strs else None
            return Tokenized(len(token_ids), service.max_model_len, token_ids, strs)

        return await json_response(answer, large=len(token_ids) > FEW_TOKENS)

    if service.settings.shows_tokenizer:

        @routes.api_route("/tokenizer_info", methods=LOOKING, summary="The tokenizer's configuration.")
        async def tokenizer_info(http: Request) -> Response:
            service.names.check_use(caller_of(http))
            return json_of(_info(service.tokenizer))

    @routes.post(
        "/detokenize", openapi_extra=Operation(decodes, Detokenized, DetokenizeRequest, DETOKENIZE, READ_FAILURES)
    )
    async def detokenize(http: Request) -> Response:
        request = await read_request(http, lambda body: parse(body, DetokenizeRequest))
        service.names.check(request.model, caller_of(http))
        largest = max(request.tokens, default=0)
        if largest >= service.vocab_size:
            raise RequestError(f"tokens: {largest}; ids must be in 0 to {service.vocab_size - 1}", param="tokens")
        if not service.tokenizer.has_text:
            raise RequestError("tokens: there is no tokenizer (--skip-tokenizer-init)", param="tokens")
        text = await service.text_of(request.tokens, caller_of(http))
        return await json_response(lambda: Detokenized(text), large=len(request.tokens) > FEW_TOKENS)

    return routes


def _info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the folder's tokenizer_config.json with the chat template in use, and without file names."""
    shown = {name: value for name, value in tokenizer.config.items() if not name.endswith(("_file", "name_or_path"))}
    source = {"chat_template": tokenizer.template.source} if tokenizer.template is not None else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **shown, **source}


def _tokenized(body: bytes) -> TokenizeChatRequest | TokenizeCompletionRequest:
    """Raises RequestError."""
    return parse(body, TokenizeChatRequest) if _is_chat(body) else parse(body, TokenizeCompletionRequest)


def _is_chat(body: bytes) -> bool:
    """Whether the body is a chat; `parse` refuses non-objects. Raises RequestError if it has both forms."""
    try:
        form = msgspec.json.decode(body, type=_Form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if form.prompt and form.messages:
        raise RequestError("prompt: messages are also given; give one of the two", param="prompt")
    return bool(form.messages)
