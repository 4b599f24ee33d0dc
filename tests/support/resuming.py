"""A client that reads a stream event by event, and can drop its connection and resume."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import httpx

TOKEN_HEADER = "x-pd-resume-token"
GIVEN = re.compile(
    rb'(?<=[{,])("(?:id|created|cached_tokens)":)(?:"(?:chatcmpl-|cmpl-|call_)[^"]*"|\d+)'
)  # differ between requests


ASK_AGAIN_EVERY_S = 0.1


class EventReader:
    """Yields one connection's events, each as bytes without the blank line.

    `patience_s`: how long it retries after a 503, as clients do while an instance is away.
    """

    def __init__(
        self,
        url: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        path: str = "/v1/completions",
        patience_s: float = 0.0,
    ) -> None:
        self._client = httpx.Client(timeout=60, trust_env=False)
        self._asking = (
            partial(self._client.stream, "GET", f"{url}/v1/streams", headers=headers)
            if body is None
            else partial(self._client.stream, "POST", url + path, json={**body, "stream": True}, headers=headers)
        )
        self._patience_s = patience_s
        self._buffer = b""

    def __enter__(self) -> EventReader:
        until_s = time.monotonic() + self._patience_s
        while True:
            self._context = self._asking()
            self.answer = self._context.__enter__()
            if self.answer.status_code != 503 or time.monotonic() > until_s:
                break
            self._context.__exit__(None, None, None)
            time.sleep(ASK_AGAIN_EVERY_S)
        if self.answer.status_code == 200:
            self._parts = self.answer.iter_raw()
        else:
            self.answer.read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)
        self._client.close()

    @property
    def token(self) -> str:
        return str(self.answer.headers[TOKEN_HEADER])

    def __iter__(self) -> Iterator[bytes]:
        """Yields events. Raises httpx.HTTPError if the connection breaks."""
        while True:
            *whole, self._buffer = self._buffer.split(b"\n\n", 1)
            if whole:
                yield whole[0]
                continue
            part = next(self._parts, None)
            if part is None:
                return
            self._buffer += part

    def take(self, number: int) -> list[bytes]:
        """Returns the next `number` events, or fewer at the stream's end."""
        return [event for _, event in zip(range(number), self, strict=False)]


def resuming(url: str, last_id: str, patience_s: float = 0.0, **headers: str) -> EventReader:
    """Resumes a stream after `last_id`, the id of the client's last event."""
    return EventReader(url, headers={"last-event-id": last_id, **headers}, patience_s=patience_s)


def id_of(event: bytes) -> str:
    line = event.split(b"\n")[0]
    assert line.startswith(b"id: "), event
    return line[4:].decode()


def data_of(event: bytes) -> bytes:
    """Returns an event without the fields that differ between two answers to one request."""
    line = event.split(b"\n")[-1]
    assert line.startswith(b"data: "), event
    return GIVEN.sub(rb"\g<1>0", line)


def token_ids_of(events: list[bytes]) -> list[int]:
    found: list[int] = []
    for event in events:
        data = event.split(b"\n")[-1].removeprefix(b"data: ")
        if data != b"[DONE]":
            for choice in json.loads(data).get("choices", ()):
                found += choice.get("token_ids") or ()
    return found


@contextlib.asynccontextmanager
async def cutting(port: int, most_nbytes: int) -> AsyncIterator[str]:
    """Yields the URL of a proxy that breaks each connection after `most_nbytes` bytes of a local server's response."""
    handlers: set[asyncio.Task[None]] = set()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        server, to_server = await asyncio.open_connection("127.0.0.1", port)
        asked = asyncio.ensure_future(_copy(client, to_server))
        try:
            left = most_nbytes
            while left and (data := await server.read(left)):
                left -= len(data)
                to_client.write(data)
                await to_client.drain()
        except asyncio.CancelledError:
            pass  # cancelled when the proxy ends
        finally:
            asked.cancel()
            for writer in (to_server, to_client):
                writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
