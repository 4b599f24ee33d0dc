"""Runs a route under a meter, and reports the remaining limits to the client in headers."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.cluster.tenancy.tenant_counts import LIMITS
from pd_cluster.cluster.tenancy.token_buckets import KeyBuckets, go_duration
from pd_cluster.service.callers.usage_meter import Meter

RATE_HEADERS = tuple(f"x-ratelimit-{what}-{limit}" for limit in LIMITS for what in ("limit", "remaining", "reset"))


async def run_metered(meter: Meter, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs the app, and settles the meter at its end, even after an error."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            has_length = any(name == b"content-length" for name, _ in message["headers"])
            left = meter.answers(message["status"], is_computed=has_length)
            if left is not None:
                message = {**message, "headers": [*message["headers"], *headers_of(left)]}
        elif not message.get("more_body"):
            meter.has_answered()
        await send(message)

    try:
        await app(scope, receive, told)
    except asyncio.CancelledError:
        meter.is_left()
        raise
    finally:
        meter.ends()


def headers_of(buckets: KeyBuckets) -> list[tuple[bytes, bytes]]:
    """Returns OpenAI's rate limit headers for the current limits."""
    return [
        (f"x-ratelimit-{what}-{name}".encode(), value.encode())
        for name, bucket in zip(LIMITS, buckets, strict=True)
        if bucket.limit
        for what, value in (
            ("limit", str(bucket.limit)),
            ("remaining", str(bucket.remaining)),
            ("reset", go_duration(bucket.reset_ns)),
        )
    ]
