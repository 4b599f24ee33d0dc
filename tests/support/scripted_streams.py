"""A server of scripted streams that records when it sent each token of each request.

Gaps are random; some events have several tokens, half of a character's bytes, or a token without text. Some streams
fail midway, by an error event or a cut connection.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
HALF_S = 0.004  # pause between the halves of a character
NUM_CACHED = 7


@dataclass(slots=True)
class SentStream:
    """One sent stream; each moment is (Unix time in seconds, tokens)."""

    request_id: str
    prompt: list[int]
    received_s: float
    moments: list[tuple[float, int]] = field(default_factory=list)
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(num for _, num in self.moments)


class ScriptedServer:
    """Serves on its own thread until the block ends; `streams`: the finished streams."""

    def __init__(self, seed: int = 0, fail_share: float = 0.1) -> None:
        self.streams: list[SentStream] = []
        self._rng = random.Random(seed)
        self._fail_share = fail_share
        self._loop = asyncio.new_event_loop()
        self._port = 0
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=500)
            self._port = server.sockets[0].getsockname()[1]
            self._is_up.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            received_s = time.time()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if "/v1/models" in head:
                await self._say_models(writer)
            elif "/v1/completions" in head:
                await self._stream(writer, headers["x-request-id"], json.loads(body), received_s)
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
        finally:
            writer.close()

    async def _say_models(self, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"data": [{"id": "scripted", "max_model_len": 4096}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def _stream(
        self, writer: asyncio.StreamWriter, request_id: str, body: dict[str, Any], received_s: float
    ) -> None:
        sent = SentStream(request_id, body["prompt"], received_s)
        rng = random.Random(self._rng.random())
        fails_after = rng.randrange(1, body["max_tokens"]) if rng.random() < self._fail_share else 0
        pause_s = rng.choice((0.012, 0.012, 0.05))  # fast and slow streams
        await asyncio.sleep(rng.choice((0.1, 0.1, 0.4)) + rng.uniform(0.0, 0.1))
        writer.write(HEAD)
        for num, text in steps(rng, body["max_tokens"]):
            await self._send(writer, sent, num, text)
            if fails_after and sent.num_tokens >= fails_after:
                sent.failed = True
                if rng.random() < 0.5:
                    writer.write(event({"error": {"message": "scripted", "code": 500}}) + b"data: [DONE]\n\n")
                break
            await asyncio.sleep(rng.uniform(0.5, 1.5) * pause_s)
        if not sent.failed:
            writer.write(event({"id": f"cmpl-{sent.request_id}", "choices": [], "usage": usage(sent)}))
            writer.write(b"data: [DONE]\n\n")
        self.streams.append(sent)

    async def _send(self, writer: asyncio.StreamWriter, sent: SentStream, num: int, text: str) -> None:
        sent.moments.append((0.0, num))
        choice = {"index": 0, "text": text}
        data = event({"id": f"cmpl-{sent.request_id}", "choices": [choice], "usage": usage(sent)})
        if "é" in text:  # sends the second half of its bytes later
            at = data.index("é".encode()) + 1
            writer.write(data[:at])
            await asyncio.sleep(HALF_S)
            data = data[at:]
        writer.write(data)
        sent.moments[-1] = time.time(), num


def steps(rng: random.Random, num_tokens: int) -> Iterator[tuple[int, str]]:
    """Yields each event's (tokens, text); a token may have no text yet."""
    while num_tokens:
        num = min(num_tokens, rng.choice((1, 1, 1, 1, 3)))
        num_tokens -= num
        yield num, rng.choice(("a", "b ", "é", "", "ö"))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def usage(sent: SentStream) -> dict[str, Any]:
    counts = {"prompt_tokens": len(sent.prompt), "completion_tokens": sent.num_tokens}
    return {**counts, "prompt_tokens_details": {"cached_tokens": NUM_CACHED}}
