"""Large bodies are parsed outside the event loop, on one thread, with clients taking turns: none blocks the others."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pd_cluster.api.middleware.http_bodies import LARGE_BODY_NBYTES
from pd_cluster.service.schema import json_body
from pd_cluster.service.schema.completion_protocol import MAX_MESSAGES, MAX_PARTS
from pd_cluster.service.schema.json_body import MAX_ESCAPES, MAX_NAMES, MAX_STRINGS, MAX_VALUES
from tests.support.public_port import make_app

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens", "/tokenize", "/detokenize"),
    *("/inference/v1/generate", "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render"),
)
LARGE, SMALL = LARGE_BODY_NBYTES + 1, 100
MOST_HELD_S = 0.1  # twice the goal, because hosts differ
PIECE_NBYTES = 64 << 10


async def ask(app: FastAPI, path: str, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("openai", "paths"), [(True, PATHS), (False, ("/generate",))])
def test_no_route_decodes_a_large_body_on_the_event_loop(openai: bool, paths: tuple[str, ...], tmp_path: Path) -> None:
    app, _ = make_app(tmp_path, openai=openai)
    on_loop: list[int] = []  # sizes of the bodies decoded on the loop's thread

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is json_body.decoded.__code__:
            on_loop.append(len(frame.f_locals["body"]))

    async def answer_to(path: str, body: bytes) -> str:
        sys.setprofile(note)  # profiles only this thread
        try:
            answer = await ask(app, path, body)
        finally:
            sys.setprofile(None)
        assert answer.status_code in (200, 400), path
        return answer.text

    for path in paths:
        small, large = (b'{"further": "' + b"x" * size + b'"}' for size in (SMALL, LARGE))
        told = [asyncio.run(answer_to(path, body)) for body in (small, large)]
        assert told[0] == told[1], "both bodies must have been read"
        assert on_loop == [len(small)], path
        on_loop.clear()


async def arriving(app: FastAPI, body: bytes, num_turns: int) -> int:
    """Waits `num_turns` turns of the loop, then sends a body in pieces, as sockets do; returns the status."""
    starts = iter(range(0, len(body), PIECE_NBYTES))
    status = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        start = next(starts, None)
        if start is None:
            return await asyncio.Future()  # the client stays connected
        stop = start + PIECE_NBYTES
        return {"type": "http.request", "body": body[start:stop], "more_body": stop < len(body)}

    async def send(message: Any) -> None:
        status.append(message.get("status"))

    for _ in range(num_turns):
        await asyncio.sleep(0)
    headers = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    more = {"headers": headers, "scheme": "http", "server": ("localhost", 80), "client": ("127.0.0.1", 9), "state": {}}
    await app({**scope, **more, "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"}}, receive, send)
    return int(status[0])


def hello(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()


def text_of(piece: bytes, number: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + piece * number + b'"}]}'


HOSTILE: dict[str, Callable[[], bytes]] = {
    "390,000 names": lambda: hello(further={str(at): 0 for at in range(390_000)}),
    "as many names as may be": lambda: hello(chat_template_kwargs={str(at): 0 for at in range(MAX_NAMES - 10)}),
    "as many messages as may be": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "a"}] * MAX_MESSAGES}
    ).encode(),
    "as many strings as may be": lambda: hello(guided_choice=[str(at) for at in range(MAX_STRINGS - 10)]),
    "as many parts as may be": lambda: json.dumps(
        {"messages": [{"role": "user", "content": ["a"] * MAX_PARTS}]}
    ).encode(),
    "as many values as may be": lambda: hello(stop_token_ids=[1] * (MAX_VALUES - 10)),
    "as many escapes as may be": lambda: text_of(rb"\u00e4", MAX_ESCAPES - 10),
    "31 MiB of text": lambda: text_of(b"a ", 31 << 19),
    "31 MiB of quotes": lambda: text_of(rb"\"", 31 << 19),
    "31 MiB of structure in a string": lambda: text_of(b"[{,:", 31 << 18),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_the_event_loop_goes_on_beside_hostile_bodies(name: str, tmp_path: Path) -> None:
    """Sends eight hostile bodies at once. Measures CPU time, independent of other processes; best of three rounds."""
    app, _ = make_app(tmp_path)
    body = HOSTILE[name]()

    async def longest_hold() -> float:
        longest_s, tasks = 0.0, [asyncio.ensure_future(arriving(app, body, at * 10)) for at in range(8)]
        while not all(task.done() for task in tasks):
            began_s = time.process_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.process_time() - began_s)
        assert {task.result() for task in tasks} <= {400, 429, 503}
        return longest_s

    held_s = min(asyncio.run(longest_hold()) for _ in range(3))
    print(f"{name}: {held_s * 1e3:.0f} ms")
    assert held_s < MOST_HELD_S
