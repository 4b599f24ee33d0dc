"""OpenAI's newer routes: /v1/responses, and the responses that are kept, where the server keeps any."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pd_cluster.api.gate.callers import caller_of, owner_of
from pd_cluster.api.gate.http import GeneratingRoute, PlainRoute, json_response, parsed, read_body
from pd_cluster.api.openai.block_answers import send
from pd_cluster.errors import ModelNotFound, RequestError
from pd_cluster.service.answers.responses_answer import ResponsesAnswer
from pd_cluster.service.response_store import Kept, ResponseStore, not_found
from pd_cluster.service.schema.own_words import in_own_words
from pd_cluster.service.schema.parse import parse
from pd_cluster.service.schema.responses_chat import ITS_NAMES, chat_of
from pd_cluster.service.schema.responses_items import items_of, listed, without_logprobs
from pd_cluster.service.schema.responses_protocol import ResponsesRequest
from pd_cluster.service.service import TextService

ONE = "/v1/responses/{response_id}"
MAX_LISTED, DEFAULT_LISTED = 100, 20
FLAG = "(--response-store)"


def response_routes(service: TextService, store: ResponseStore | None) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)

    @routes.post("/v1/responses")
    async def create(http: Request) -> Response:
        received_s = time.monotonic()
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, ResponsesRequest, has_own_names=True))
        name = service.names.check(request.model, caller_of(http))
        _check_store(request, store)
        if request.input is None and request.previous_response_id is None:
            raise RequestError("input: missing; give a text or items, or a previous_response_id", param="input")
        keeps, earlier = store is not None and request.store is not False, await _earlier(http, service, store, request)
        with in_own_words(ITS_NAMES):
            chat = await parsed(http, len(body), lambda: chat_of(request, earlier, service.template_variables))
            generation = await service.chat(chat, received_s, caller_of(http))
        answer = ResponsesAnswer(request, name, service.tokenizer, generation, keeps)

        owner = owner_of(http)

        async def keep() -> None:
            if store is None or not keeps:
                return

            def keep_now() -> bool:
                return store.keep(owner, Kept(answer.whole(), [*earlier, *listed(items_of(request))]))

            if not await store.on_thread(keep_now):
                answer.is_not_stored()

        return await send(http, service, answer, keep)

    return routes


def input_routes(service: TextService, store: ResponseStore | None) -> APIRouter:
    """The routes that look at an input alone; no instance takes part in them."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.post("/v1/responses/input_tokens")
    async def input_tokens(http: Request) -> Response:
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, ResponsesRequest, has_own_names=True))
        service.names.check(request.model, caller_of(http))
        _check_store(request, store)
        earlier = await _earlier(http, service, store, request)
        with in_own_words(ITS_NAMES):
            chat = await parsed(http, len(body), lambda: chat_of(request, earlier, service.template_variables))
            num_tokens = await service.chat_num_tokens(chat, caller_of(http))
        told = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return await json_response(lambda: told, large=False)

    @routes.post("/v1/responses/compact")
    async def compact(http: Request) -> Response:
        await read_body(http)
        raise RequestError(
            "POST /v1/responses/compact: not supported here, since nothing is encrypted; ask for a summary with "
            "/v1/responses and go on from that",
            code="unsupported_value",
        )

    return routes


def kept_response_routes(service: TextService, store: ResponseStore | None) -> APIRouter:
    """The routes of kept responses; no instance takes part in them."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.get(ONE)
    async def retrieve(http: Request) -> Response:
        if http.query_params.get("stream") == "true":
            raise RequestError("stream: a kept response is not streamed again; leave it out", param="stream")
        return JSONResponse((await _find(http, service, store, _id_of(http))).response)

    @routes.delete(ONE)
    async def delete(http: Request) -> Response:
        response_id = _id_of(http)
        await _find(http, service, store, response_id)
        assert store is not None, "found without a store"
        await store.on_thread(store.remove, owner_of(http), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.post(ONE + "/cancel")
    async def cancel(http: Request) -> Response:
        await _find(http, service, store, _id_of(http))
        raise RequestError("only responses made with background: true can be cancelled, and this server makes none")

    @routes.get(ONE + "/input_items")
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
                raise RequestError("after: the response has no item of this id", param="after")
            items = items[places[0] + 1 :]
        shown = items[: int(limit)]
        ids = [item["id"] for item in shown] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > len(shown)}
        return JSONResponse({"object": "list", "data": shown, **ends})

    return routes


def _id_of(http: Request) -> str:
    found: str = http.path_params["response_id"]
    return found


async def _find(http: Request, service: TextService, store: ResponseStore | None, response_id: str) -> Kept:
    """Returns a response of the caller's own, of a model that it may use. Raises RequestNotFound."""
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


def _check_store(request: ResponsesRequest, store: ResponseStore | None) -> None:
    """Raises RequestError for what needs responses that are kept, where none are."""
    if store is not None:
        return
    if request.store:
        raise RequestError(f"store: this server keeps no responses {FLAG}; leave it out, or give false", param="store")
    if request.previous_response_id is not None:
        raise RequestError(
            f"previous_response_id: this server keeps no responses {FLAG}; send the earlier items in input",
            param="previous_response_id",
        )
