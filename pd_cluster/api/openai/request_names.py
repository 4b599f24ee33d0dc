"""The client's name for a request, from a field or a header."""

from __future__ import annotations

import re
import secrets
from typing import TypeVar

from fastapi import Request

from pd_cluster.service.schema.protocol import REQUEST_ID, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def name_for(own: str | None, http: Request) -> str:
    """Returns a request's own name, that of the header X-Request-Id, or a new one."""
    name = http.headers.get("x-request-id", "")
    return own or (name if re.fullmatch(REQUEST_ID, name) else secrets.token_hex(16))


def named(request: RequestT, http: Request) -> RequestT:
    """Names a request without a name of its own by the header X-Request-Id."""
    name = http.headers.get("x-request-id", "")
    if request.request_id is None and re.fullmatch(REQUEST_ID, name):
        request.request_id = name
    return request
