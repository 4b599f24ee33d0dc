"""Answers errors in the format of their route, OpenAI's or Anthropic's, for every HTTP server of the project.

Does not import FastAPI, which would take most of a worker's start-up time.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pd_cluster.errors import Overloaded, PdClusterError, RequestError, Unavailable
from pd_cluster.service.schema.error_bodies import Error, MessageError, error_body_at, status_of

log = logging.getLogger(__name__)

BATCHES = "files and batches need --files-dir; `pd-cluster run-batch` answers a file of requests"
NOT_HERE = {  # path prefix of other servers' routes -> the alternative here
    "/v1/batches": BATCHES,
    "/v1/files": BATCHES,
    "/v1/uploads": "files are uploaded whole, to /v1/files",
    "/v1/messages/batches": "batches have OpenAI's form here: /v1/batches, or `pd-cluster run-batch`",
    "/v1/conversations": "conversations are not stored; send all items to /v1/responses, or a previous_response_id",
    "/v1/moderations": "moderation is not supported",
    "/v1/audio/": "audio is not supported",
    "/v1/images/": "this server generates no images; /v1/chat/completions takes images, if the model does",
    "/cohere/v2/": "Cohere's chats are not supported; send the conversation to /v1/chat/completions",
    "/adapters": "adapters are loaded and unloaded at the scheduler's admin port",
    "/v1/load_lora_adapter": "adapters are loaded at the scheduler's admin port",
    "/v1/unload_lora_adapter": "adapters are unloaded at the scheduler's admin port",
    "/abort_requests": "the scheduler's admin port ends requests; a client ends its own by closing its connection",
}


def error_response(error: Exception, path: str) -> Response:
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Unavailable | Overloaded) else {}
    return _response(error_body_at(path, error), status_of(error), headers)


def _response(body: Error | MessageError, status: int, headers: Mapping[str, str] | None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def install_error_handlers(app: Starlette, here: Collection[str] = ()) -> None:
    """`here`: the paths of NOT_HERE that this app does have."""
    not_here = {part: way for part, way in NOT_HERE.items() if part not in here}

    async def known(request: Request, error: Exception) -> Response:
        return error_response(error, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "unknown_url", 405: "method_not_supported"}.get(error.status_code)
        why = next((f"; {way}" for part, way in not_here.items() if part in request.url.path), "") if code else ""
        told = RequestError(f"{request.method} {request.url.path}: {error.detail}{why}", code=code)
        body = error_body_at(request.url.path, told, error.status_code)
        return _response(body, error.status_code, error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        named = {"request_id": name} if (name := request.headers.get("x-request-id", "")[:256]) else {}
        log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error, extra=named)
        return error_response(error, request.url.path)

    app.add_exception_handler(PdClusterError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
