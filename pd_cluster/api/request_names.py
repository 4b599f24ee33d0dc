"""What clients call their requests, in a field or in a header."""

from __future__ import annotations

import re
from typing import TypeVar

from fastapi import Request

from pd_cluster.api.protocol import REQUEST_ID, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def named(request: RequestT, http: Request) -> RequestT:
    """The header X-Request-Id names a request that has no name of its own."""
    name = http.headers.get("x-request-id", "")
    if request.request_id is None and re.fullmatch(REQUEST_ID, name):
        request.request_id = name
    return request
