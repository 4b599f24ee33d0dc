"""Forwards the playground's chats to the public port, because a page at the admin port cannot query another port.

Sends the page's body unread and unchanged, with the page's API key, which the public port checks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from pd_cluster.api.api_extension import CONNECT_TIMEOUT_S, PublicPort
from pd_cluster.api.middleware.http_bodies import read_body
from pd_cluster.errors import Unavailable
from pd_cluster.extras.dashboard.dashboard_routes import HEADERS

SERVED_BY = "x-pd-served-by"
KEY_HEADER = "x-pd-api-key"


def playground_routes(public: PublicPort) -> APIRouter:
    routes = APIRouter()

    @routes.post("/chat")
    async def chat(request: Request) -> Response:
        """Answers as /v1/chat/completions does."""
        return await _forward(public, "/v1/chat/completions", await read_body(request), request)

    @routes.get("/models")
    async def models(request: Request) -> Response:
        async with public.client() as client:
            try:
                answer = await client.get(f"{public.url}/v1/models", headers=_key(request), timeout=CONNECT_TIMEOUT_S)
            except httpx.HTTPError as error:
                raise _unreachable(error) from None
        return _copied(answer)

    return routes


async def _forward(public: PublicPort, path: str, body: bytes, request: Request) -> Response:
    client = public.client()
    headers = {"Content-Type": "application/json", **_key(request)}
    try:
        answer = await client.send(
            client.build_request("POST", f"{public.url}{path}", content=body, headers=headers), stream=True
        )
    except httpx.HTTPError as error:
        await client.aclose()
        raise _unreachable(error) from None
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        try:
            await answer.aread()
        finally:
            await answer.aclose()
            await client.aclose()
        return _copied(answer)
    shown = {
        **HEADERS,
        "Cache-Control": "no-store",
        "X-Accel-Buffering": "no",
        SERVED_BY: answer.headers.get(SERVED_BY, ""),
    }
    return StreamingResponse(_parts(client, answer), headers=shown, media_type="text/event-stream")


async def _parts(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yields the parts of the answer. Ends the request at the public port when the page stops reading."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
        await client.aclose()


def _copied(answer: httpx.Response) -> Response:
    kept = {name: answer.headers[name] for name in (SERVED_BY, "retry-after") if name in answer.headers}
    return Response(
        answer.content,
        answer.status_code,
        headers={**HEADERS, "Cache-Control": "no-store", **kept},
        media_type=answer.headers.get("content-type", "application/json"),
    )


def _key(request: Request) -> dict[str, str]:
    key = request.headers.get(KEY_HEADER, "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _unreachable(error: Exception) -> Unavailable:
    return Unavailable(f"the public port does not answer: {str(error) or type(error).__name__}")
