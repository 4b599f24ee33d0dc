"""Calls the public port's app as a server would, without a cluster and without a client that normalizes paths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from tokenizers import Tokenizer, processors

from pd_cluster.api.api_extension import ApiExtension
from pd_cluster.api.middleware.drain_middleware import Drain
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.api.public_app import public_app
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.routing.request_admission import RequestAdmission
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import Unavailable
from pd_cluster.service.request_traces import Tracing
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.checkpoints import make_tokenizer, text_checkpoint
from tests.support.router_world import admission_of
from tests.support.service_configs import service_config

MAX_MODEL_LEN = 1000
NAMES = ("tiny", "org/tiny")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    num_received: int  # number of the body's messages that the app read
    parts: list[bytes] = field(default_factory=list)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def make_special_tokenizer() -> Tokenizer:
    """Makes a tokenizer that puts <bos> before texts."""
    tokenizer = make_tokenizer()
    bos = [("<bos>", tokenizer.token_to_id("<bos>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=bos)
    return tokenizer


def _unavailable(*_: Any, **__: Any) -> None:
    raise Unavailable("there is no instance")


def make_app(
    folder: Path,
    http: HttpConfig | None = None,
    openai: bool = True,
    served_model_names: Sequence[str] = NAMES,
    admission: RequestAdmission | None = None,
    router: Router | None = None,
    file_keys: FileKeys | None = None,
    extensions: Sequence[ApiExtension] = (),
    tracing: Tracing | None = None,
    **settings: Any,
) -> tuple[FastAPI, Drain]:
    """Makes the app. Without a router there is no instance: routes that need none work, all others return 503.

    `settings`: further settings of the text service.
    """
    checkpoint = text_checkpoint(folder, make_special_tokenizer())
    membership = SimpleNamespace(instances=[])
    nobody = SimpleNamespace(
        membership=membership,
        stats=RequestStats(),
        num_streams=0,
        num_waiting=0,
        streams=SimpleNamespace(on_opened=[], on_ended=[]),
        admission=admission or admission_of(),
        serve=_unavailable,
    )
    router = router or cast(Router, nobody)
    settings |= {"http": http or HttpConfig(), "is_openai": openai}
    config = service_config("/models/tiny", MAX_MODEL_LEN, tuple(served_model_names), **settings)
    drain = Drain(1.0, lambda: None)
    service = TextService(router, checkpoint, config, tracing)
    return public_app(service, [], drain, file_keys=file_keys, extensions=extensions), drain


def ask(
    app: Any, method: str, path: str, headers: Sequence[tuple[str, str]] = (), body: bytes | dict[str, Any] = b""
) -> Answer:
    """Sends a request; `path` is decoded as by the server, and may have a query after `?`."""
    return asyncio.run(send(app, method, path, headers, body))


def ask_each(app: Any, method: str, paths: Iterable[str]) -> list[tuple[str, Answer]]:
    """Sends requests one by one; returns (path, answer) pairs. Uses one event loop, because making one is slow."""

    async def run() -> list[tuple[str, Answer]]:
        return [(path, await send(app, method, path)) for path in paths]

    return asyncio.run(run())


async def send(
    app: Any,
    method: str,
    path: str,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes | dict[str, Any] = b"",
    client: tuple[str, int] = ("127.0.0.1", 1),
) -> Answer:
    """Sends a request within an event loop, from a client at this address."""
    path, _, query = path.partition("?")
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
        "client": client,
        "server": ("127.0.0.1", 80),
    }
    answer = Answer(0, {}, b"", 0)
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        answer.num_received += 1
        if answer.num_received > 1:
            await never.wait()
        return {"type": "http.request", "body": content, "more_body": False}

    async def answered(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.parts.append(message.get("body", b""))

    async with asyncio.timeout(20):
        await app(scope, receive, answered)
    answer.body = b"".join(answer.parts)
    return answer
