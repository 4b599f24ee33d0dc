"""The caller of an HTTP request is made once, and again when the request's key or queue entry has changed."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request

from pd_cluster.api.middleware.http_callers import ARRIVED, SCOPE, caller_of
from pd_cluster.service.callers.caller import NOBODY, Caller


def request(*headers: tuple[bytes, bytes], client: tuple[str, int] | None = ("10.0.0.7", 1)) -> Request:
    return Request({"type": "http", "headers": list(headers), "client": client})


def test_a_caller_is_made_once_and_anew_with_another_key() -> None:
    """All prompts of a request share one group, because its caller is made only once."""
    http = request((b"x-stainless-timeout", b"30"))
    first = caller_of(http)
    assert first.client == "10.0.0.7"
    assert first.client_timeout_s == 30
    assert caller_of(http) is first
    assert caller_of(Request(http.scope)) is first
    assert caller_of(request()).group is not first.group
    caller = caller_of(request((b"x-stainless-timeout", b"soon"), client=None))
    assert (caller.client, caller.client_timeout_s) == (NOBODY.client, math.inf)
    http = request()
    assert caller_of(http).client == "10.0.0.7"
    http.scope[SCOPE] = Caller("tenant")
    assert caller_of(http).client == "tenant"


def test_the_queue_is_noticed_in_a_copied_scope() -> None:
    """Covers middleware that reads the caller before it passes on a copied scope with its own function."""
    http, told = request(), list[Any]()
    caller_of(http)

    def arrived() -> None:
        told.append("arrived")

    inner = Request({**http.scope, ARRIVED: arrived})
    caller_of(inner).arrived()
    assert told == ["arrived"]
    assert caller_of(inner) is caller_of(inner)
