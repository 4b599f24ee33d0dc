"""Made-up HTTP workers behind sglang-router: they answer its probes, and a chat with a stream of the same text.

    python -m benchmarks.peers.sglang_workers SPEC

In its prefill/decode mode the router sends a request to one of each kind and forwards the decode worker's stream, which
begins once the prompt has "been computed". Nothing is computed; all workers share this process.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.peers.router_workers import steps, until_told
from benchmarks.router.spec import PREFILL_STEP_S, WorkersSpec

INFO = {"served_model_name": "made-up", "is_generation": True, "dp_size": 1, "tp_size": 1, "status": "ready"}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    """One request at a time; `asked` is called for each chat."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.transport: asyncio.Transport
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.left(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._buffer.startswith(b"PRI"):  # a probe for gRPC
            self.transport.abort()
            return
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        num_body = int(length[1]) if length else 0
        if not end or len(rest) < num_body:
            return
        self._buffer = rest[num_body:]
        path = head.split(b" ", 2)[1]
        if path == b"/v1/chat/completions":
            self.worker.asked(self, msgspec.json.decode(rest[:num_body]))
        else:
            self.answer({**INFO, "model_path": self.worker.model_path})

    def answer(self, body: Any) -> None:
        encoded = msgspec.json.encode(body)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(encoded)
        self.transport.write(head + encoded)

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


class Worker:
    def __init__(self, spec: WorkersSpec, is_prefill: bool, times: dict[int, tuple[float, float]]) -> None:
        self._is_prefill, self._times = is_prefill, times
        self.model_path = spec.model_path
        self._words = spec.text.split()
        self._waiting: list[tuple[Connection, dict[str, Any], float]] = []
        self._running: dict[Connection, list[int]] = {}  # tokens sent, tokens wanted

    def asked(self, connection: Connection, body: dict[str, Any]) -> None:
        self._waiting.append((connection, body, time.monotonic()))

    def left(self, connection: Connection) -> None:
        self._running.pop(connection, None)

    def first_tokens(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection, body, read_s in waiting:
            if self._is_prefill:
                connection.answer({"object": "chat.completion", "choices": []})
                continue
            connection.transport.write(STREAM)
            first = event([choice({"role": "assistant", "content": ""})]) + self._token(0)
            if (wanted := body["max_completion_tokens"]) == 1:
                self._end(connection, first, 1)
            else:
                connection.chunk(first)
                self._running[connection] = [1, wanted]
            self._times[body["seed"]] = (read_s, time.monotonic())

    def step(self) -> None:
        """Sends a token of every stream. The last one carries the end, the usage and the stream's end marker."""
        for connection, told in list(self._running.items()):
            events = self._token(told[0])
            told[0] += 1
            if told[0] >= told[1]:
                del self._running[connection]
                self._end(connection, events, told[1])
            else:
                connection.chunk(events)

    def _end(self, connection: Connection, events: bytes, num_tokens: int) -> None:
        usage = {"prompt_tokens": 40, "completion_tokens": num_tokens, "total_tokens": 40 + num_tokens}
        connection.chunk(events + event([choice({}, "length")]) + event([], usage) + b"data: [DONE]\n\n")
        connection.transport.write(b"0\r\n\r\n")

    def _token(self, at: int) -> bytes:
        return event([choice({"content": " " + self._words[at % len(self._words)]})])


def choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    """Returns an event of the same size as this project's own."""
    head = {"id": "chatcmpl-" + "0" * 24, "object": "chat.completion.chunk", "created": 0, "model": "made-up"}
    return b"data: " + msgspec.json.encode({**head, "choices": choices, "usage": usage}) + b"\n\n"


async def serve(spec: WorkersSpec) -> None:
    times: dict[int, tuple[float, float]] = {}
    loops = []
    for me in spec.workers:
        worker = Worker(spec, me.role == "prefill", times)
        await asyncio.get_running_loop().create_server(partial(Connection, worker), "127.0.0.1", me.port)
        loops += [steps(worker.first_tokens, PREFILL_STEP_S), steps(worker.step, spec.step_s)]
    await until_told(*loops)
    Path(spec.times_file).write_bytes(msgspec.json.encode(times))


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkersSpec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(spec))


if __name__ == "__main__":
    main()
