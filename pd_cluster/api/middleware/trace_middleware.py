"""Traces each request that generates or embeds: reads `traceparent` and `tracestate`, and sends its own in the answer.

Only active with --otlp-traces-endpoint. Runs after the key check, so that only valid callers cause traces.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.cluster.records.request_timeline import FOLLOWER
from pd_cluster.service.request_traces import PARENT, STATE, Tracing

# path -> the operation's name, OpenTelemetry's if it has one; other routes are not traced.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/generate": "text_completion",
    "/v1/chat/completions/batch": "chat",
    "/v1/chat/completions/render": "render",
    "/v1/completions/render": "render",
    "/v1/messages/render": "render",
    "/v1/responses/render": "render",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "embeddings",
    "/classify": "classify",
    "/generative_scoring": "score",
    "/v1/score": "score",
    "/score": "score",
    "/v2/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/invocations": "invocation",
}
CONTEXT = (PARENT.encode(), STATE.encode())


class Traces:
    def __init__(self, app: ASGIApp, tracing: Tracing, root_path: str = "") -> None:
        self._app, self._tracing = app, tracing
        self._operations = {f"{root_path}{path}": operation for path, operation in OPERATIONS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._operations.get(scope.get("path", "")) if scope["type"] == "http" else None
        if operation is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        context = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in CONTEXT}
        trace = self._tracing.begin(operation, scope["path"], context)
        status = 0

        async def send_with_trace(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(name.encode(), value.encode("latin-1")) for name, value in trace.headers.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        token = FOLLOWER.set(trace if trace.is_recorded else None)
        error = ""
        try:
            await self._app(scope, receive, send_with_trace)
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            FOLLOWER.reset(token)
            trace.end(status, error)
