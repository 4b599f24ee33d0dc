"""Errors in OpenAI's shape, from every HTTP server of the project.

Needs no FastAPI: importing it would be the larger part of a worker's start.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pd_cluster.api.status import status_of
from pd_cluster.errors import DeadlineExceeded, GenerationError, Overloaded, PdClusterError, RequestError, Unavailable

log = logging.getLogger(__name__)


def error_body(error: Exception) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; nothing of ours leaks from an unexpected exception."""
    kind, param, code = "internal_error", None, None
    message = "internal error; the server's log has the details"
    if isinstance(error, RequestError):
        kind, param, code = "invalid_request_error", error.param, error.code
    elif isinstance(error, Unavailable):
        kind, code = "service_unavailable", "no_instance"
    elif isinstance(error, Overloaded):
        kind, code = "rate_limit_error", "overloaded"
    elif isinstance(error, DeadlineExceeded):
        kind, code = "timeout_error", "deadline_exceeded"
    elif isinstance(error, GenerationError):
        kind, code = "server_error", "generation_failed"
    if isinstance(error, PdClusterError):
        message = str(error)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Unavailable | Overloaded) else {}
    return JSONResponse(error_body(error), status_of(error), headers)


def install_error_handlers(app: Starlette) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "unknown_url", 405: "method_not_supported"}.get(error.status_code)
        body = error_body(RequestError(f"{request.method} {request.url.path}: {error.detail}", code=code))
        return JSONResponse(body, error.status_code, error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
        return error_response(error)

    app.add_exception_handler(PdClusterError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
