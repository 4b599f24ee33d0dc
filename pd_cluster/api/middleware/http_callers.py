"""The caller of an HTTP request: the owner of its API key, or the peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from starlette.requests import Request
from starlette.types import Scope

from pd_cluster.api.connections.subscriber import subscriber_of
from pd_cluster.cluster.streams.request_origin import PromptGroup
from pd_cluster.service.callers.caller import NOBODY, Caller, nothing
from pd_cluster.service.generation.prompt_generation import Generation

SCOPE = "pd_cluster.caller"  # the key of the caller in the ASGI scope
ARRIVED = "pd_cluster.arrived"  # the key of the function to call when the router has the request
MADE = "pd_cluster.made_caller"  # the key of the last result of `caller_of`, with its inputs
PATIENCE_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")  # sent by OpenAI's clients: seconds


def count_request(http: Request) -> None:
    """Counts the request before any work is done for it. Raises RateLimited, Unauthorized."""
    if (meter := caller_of(http).meter) is not None:
        meter.count()


def reserve_tokens(http: Request, generations: Sequence[Generation]) -> None:
    """Reserves the maximum number of tokens of a request, before it is sent to an instance.

    Raises RateLimited, RequestError.
    """
    if (meter := caller_of(http).meter) is not None:
        meter.reserve(generations)


def caller_of(http: Request) -> Caller:
    """Returns the request's only Caller: the key's owner or, without keys, the peer's address."""
    known, arrived = http.scope.get(SCOPE), http.scope.get(ARRIVED, nothing)
    made_from, made = http.scope.get(MADE, (None, None))
    if made is not None and made_from is known and made.arrived is arrived:
        return cast(Caller, made)
    known_caller = known if isinstance(known, Caller) else Caller(client_of(http.scope))
    client_timeout_s, group, session = _client_timeout_s(http), PromptGroup(), session_of(http)
    made = replace(known_caller, client_timeout_s=client_timeout_s, arrived=arrived, group=group, session=session)
    http.scope[MADE] = (known, made)
    return made


def client_of(scope: Scope) -> str:
    """Returns the owner of the key; without keys, the peer's address; "" for a Unix socket."""
    known, peer = scope.get(SCOPE), scope.get("client")  # (host, port)
    if isinstance(known, Caller):
        return known.client
    return subscriber_of(peer[0]) if peer else NOBODY.client


def owner_of(http: Request) -> str:
    """Returns the owner of data stored for the caller: the key's tenant; without keys, all callers are one owner."""
    known = http.scope.get(SCOPE)
    return known.client if isinstance(known, Caller) else ""


def session_of(request: Request) -> str:
    """Returns the client's name for the request's session; "" if there is none."""
    return request.headers.get("x-session-id", "")


def _client_timeout_s(http: Request) -> float:
    """Returns the timeout that the client declares; inf if it declares none, or an implausible value."""
    for name in PATIENCE_HEADERS:
        if not (declared := http.headers.get(name)):
            continue
        try:
            client_timeout_s = float(declared)
        except ValueError:
            continue
        if client_timeout_s > 0:
            return client_timeout_s
    return math.inf
