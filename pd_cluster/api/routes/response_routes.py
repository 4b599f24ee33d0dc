"""OpenAI's routes of responses: /v1/responses, and stored responses, if the server stores any."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta

from pd_cluster.api.middleware.direct_routes import GeneratingRoute, PlainRoute
from pd_cluster.api.middleware.http_bodies import json_of, parsed, read_body
from pd_cluster.api.middleware.http_callers import caller_of, owner_of
from pd_cluster.api.openapi.operations import READ_FAILURES, Operation, path_parameter, query_parameter
from pd_cluster.api.openapi.request_examples import RESPONSES
from pd_cluster.api.routes.block_answers import send
from pd_cluster.api.routes.tokens.render_routes import rendered_chat
from pd_cluster.errors import ModelNotFound, RequestError
from pd_cluster.service.answers.response_store import KeptResponse, ResponseStore, not_found
from pd_cluster.service.answers.responses_answer import PREFIX, ResponseEvent, ResponseObject, ResponsesAnswer
from pd_cluster.service.schema.error_field_names import with_field_names
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.schema.responses.responses_items import items_of, listed, without_logprobs
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.responses.responses_to_chat import FIELD_NAMES, chat_of
from pd_cluster.service.schema.tokens.tokens_protocol import RenderedPrompt
from pd_cluster.service.text_service import TextService

ONE = "/v1/responses/{response_id}"
MAX_LISTED, DEFAULT_LISTED = 100, 20
RESPONSE_ID = path_parameter("response_id")
LISTING = (
    query_parameter("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED}),
    query_parameter("after", {"type": "string"}),
)
FLAG = "(--response-store)"


class ResponseInputTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Annotated[bool, Meta(extra_json_schema={"const": True})]


class InputItems(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Annotated[bool, Meta(description="If true, ask again with `after` set to last_id.")]


def response_routes(service: TextService, store: ResponseStore | None) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    operation = Operation("Answer a conversation that is given as items.", ResponseObject, ResponsesRequest, RESPONSES)

    @routes.post("/v1/responses", openapi_extra=operation.events(ResponseEvent))
    async def responses(http: Request) -> Response:
        received_s = time.monotonic()
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, ResponsesRequest, has_own_names=True))
        name = service.names.check(request.model, caller_of(http))
        _check_store(request, store)
        _check_messages(request)
        if request.input is None and request.previous_response_id is None:
            raise RequestError("input: missing; give a text or items, or a previous_response_id", param="input")
        keeps, earlier = store is not None and request.store is not False, await _earlier(http, service, store, request)
        with with_field_names(FIELD_NAMES):
            chat = await parsed(http, len(body), lambda: chat_of(request, earlier, service.template_variables))
            generation = await service.chat(chat, received_s, caller_of(http))
        answer = ResponsesAnswer(request, name, service.tokenizer, generation, keeps)

        owner = owner_of(http)

        async def keep() -> None:
            if store is None or not keeps:
                return

            def keep_now() -> bool:
                response = msgspec.json.decode(msgspec.json.encode(answer.whole()))
                return store.keep(owner, KeptResponse(response, [*earlier, *listed(items_of(request))]))

            if not await store.on_thread(keep_now):
                answer.is_not_stored()

        return await send(http, service, answer, keep)

    return routes


def input_routes(service: TextService, store: ResponseStore | None) -> APIRouter:
    """Makes the routes that only read an input, without instances."""
    routes = APIRouter(route_class=PlainRoute)

    counts = "The number of tokens of the prompt that /v1/responses would compute."
    plain = {"plain": RESPONSES["plain"]}

    @routes.post(
        "/v1/responses/input_tokens",
        openapi_extra=Operation(counts, ResponseInputTokens, ResponsesRequest, plain, READ_FAILURES),
    )
    async def count_input_tokens(http: Request) -> Response:
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, ResponsesRequest, has_own_names=True))
        service.names.check(request.model, caller_of(http))
        _check_store(request, store)
        earlier = await _earlier(http, service, store, request)
        with with_field_names(FIELD_NAMES):
            chat = await parsed(http, len(body), lambda: chat_of(request, earlier, service.template_variables))
            num_tokens = await service.chat_num_tokens(chat, caller_of(http))
        return json_of(ResponseInputTokens("response.input_tokens", num_tokens))

    rendered = "The body of /inference/v1/generate that answers these items."

    @routes.post("/v1/responses/render", openapi_extra=Operation(rendered, RenderedPrompt, ResponsesRequest, plain))
    async def render_response(http: Request) -> Response:
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, ResponsesRequest, has_own_names=True))
        name = service.names.check(request.model, caller_of(http))
        _check_store(request, store)
        earlier = await _earlier(http, service, store, request)
        with with_field_names(FIELD_NAMES):
            chat = await parsed(http, len(body), lambda: chat_of(request, earlier, service.template_variables))
            return json_of(await rendered_chat(http, service, chat, name, PREFIX.removesuffix("_")))

    @routes.post(
        "/v1/responses/compact",
        summary="Shorten a conversation: not supported here.",
        status_code=400,
        responses={413: {}},
    )
    async def compact(http: Request) -> Response:
        await read_body(http)
        raise RequestError(
            "POST /v1/responses/compact: not supported; ask for a summary with /v1/responses and continue from that",
            code="unsupported_value",
        )

    return routes


def kept_response_routes(service: TextService, store: ResponseStore | None) -> APIRouter:
    """Makes the routes of stored responses, which use no instance."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.get(ONE, openapi_extra=_of_kept("A response that was kept (--response-store).", ResponseObject))
    async def response(http: Request) -> Response:
        if http.query_params.get("stream") == "true":
            raise RequestError("stream: a stored response cannot be streamed; leave it out", param="stream")
        return json_of((await _find(http, service, store, _id_of(http))).response)

    @routes.delete(ONE, openapi_extra=_of_kept("Forget a response.", ResponseDeleted))
    async def delete_response(http: Request) -> Response:
        response_id = _id_of(http)
        await _find(http, service, store, response_id)
        assert store is not None, "found without a store"
        await store.on_thread(store.remove, owner_of(http), response_id)
        return json_of(ResponseDeleted(response_id, "response", deleted=True))

    @routes.post(
        ONE + "/cancel",
        summary="Cancel a response: always refused, because no response runs in the background.",
        status_code=400,
        responses={404: {}},
        openapi_extra={"parameters": [RESPONSE_ID]},
    )
    async def cancel_response(http: Request) -> Response:
        await _find(http, service, store, _id_of(http))
        raise RequestError("only responses made with background: true can be cancelled, and this server makes none")

    @routes.get(ONE + "/input_items", openapi_extra=_of_kept("The input of a response.", InputItems, *LISTING))
    async def input_items(http: Request) -> Response:
        kept = await _find(http, service, store, _id_of(http))
        asked = http.query_params
        order, limit = asked.get("order", "desc"), asked.get("limit", str(DEFAULT_LISTED))
        if order not in ("asc", "desc"):
            raise RequestError("order: expected asc or desc", param="order")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
            raise RequestError(f"limit: expected 1 to {MAX_LISTED}", param="limit")
        items = kept.items if order == "asc" else kept.items[::-1]
        if (after := asked.get("after")) is not None:
            places = [at for at, item in enumerate(items) if item["id"] == after]
            if not places:
                raise RequestError("after: the response has no item with this id", param="after")
            items = items[places[0] + 1 :]
        shown = items[: int(limit)]
        ids = [item["id"] for item in shown] or [None]
        return json_of(InputItems("list", shown, ids[0], ids[-1], has_more=len(items) > len(shown)))

    return routes


def _of_kept(summary: str, answer: type[msgspec.Struct], *queries: dict[str, Any]) -> Operation:
    return Operation(summary, answer, errors=(400, 404)).at(RESPONSE_ID, *queries)


def _id_of(http: Request) -> str:
    found: str = http.path_params["response_id"]
    return found


async def _find(http: Request, service: TextService, store: ResponseStore | None, response_id: str) -> KeptResponse:
    """Returns one of the caller's responses, if the caller may use its model. Raises RequestNotFound."""
    if store is None:
        raise not_found(response_id)
    kept = await store.on_thread(store.find, owner_of(http), response_id)
    try:
        service.names.check(kept.response["model"], caller_of(http))
    except ModelNotFound:
        raise not_found(response_id) from None
    return kept


async def _earlier(
    http: Request, service: TextService, store: ResponseStore | None, request: ResponsesRequest
) -> list[dict[str, Any]]:
    """Returns the items before the request's own. Raises RequestNotFound."""
    if request.previous_response_id is None:
        return []
    return without_logprobs((await _find(http, service, store, request.previous_response_id)).conversation)


def _check_messages(request: ResponsesRequest) -> None:
    """Raises RequestError if raw messages would show reasoning that the request hides."""
    if request.enable_response_messages and request.include_reasoning is False:
        name = "enable_response_messages"
        raise RequestError(
            f"{name}: shows the reasoning that include_reasoning false hides; give only one of them", name
        )


def _check_store(request: ResponsesRequest, store: ResponseStore | None) -> None:
    """Raises RequestError for fields that need stored responses if the server stores none."""
    if store is not None:
        return
    if request.store:
        raise RequestError(f"store: this server stores no responses {FLAG}; leave it out, or give false", param="store")
    if request.previous_response_id is not None:
        raise RequestError(
            f"previous_response_id: this server stores no responses {FLAG}; send the earlier items in input",
            param="previous_response_id",
        )
