"""The client's name for a request, from a field or a header."""

from __future__ import annotations

import re
from typing import TypeVar

from fastapi import Request

from pd_cluster.service.schema.completion_protocol import REQUEST_ID, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def named(request: RequestT, http: Request) -> RequestT:
    """Gives a request that has no name the one in the header X-Request-Id."""
    request.request_id = name_of(request.request_id, http)
    return request


def name_of(own: str | None, http: Request) -> str | None:
    """Returns the request's own name, or the header's if it is valid."""
    name = http.headers.get("x-request-id", "")
    return name if own is None and re.fullmatch(REQUEST_ID, name) else own
