"""Sends many streamed chats at a time at low cost: over raw connections without an HTTP library, and parsing only
counted fields.

    python -m benchmarks.peers.router_load SPEC RESULT

Reads the router's CPU time and memory directly before and after its load. Knows nothing of the server.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Callable
from typing import cast

import msgspec
import uvloop

from benchmarks.engine_messages import given_spec
from benchmarks.process_use import raise_open_files, rss_nbytes, waited_s
from benchmarks.router.router_messages import TEXT, LoadResult, LoadSpec
from pd_cluster.bench.process_times import cpu_s

END_OF_BODY = b"0\r\n\r\n"
MAX_ERRORS = 10
GAPS_OF_EVERY = 16  # the gaps of one in this many streams are kept
SETTLE_S = 0.5
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class Client(asyncio.Protocol):
    """One connection, one request at a time. `ended(client, error)` is called at the end of each."""

    def __init__(self, started: Callable[[Client], None], ended: Callable[[Client, str], None]) -> None:
        self.started, self.ended = started, ended
        self.seed = 0
        self.first_s = 0.0
        self.num_events = 0
        self.arrivals_s: list[float] | None = None
        self._is_open = False  # a request is in progress
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is a different one

    def send(self, seed: int, request: bytes) -> None:
        assert self._transport is not None
        self.seed, self.first_s, self.num_events, self._tail = seed, 0.0, 0, b""
        self.arrivals_s = [] if seed % GAPS_OF_EVERY == 0 else None
        self._is_open = True
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        tail = self._tail
        if self._is_open and not tail and b" 200 " not in data[:16]:
            self._is_open = False
            self.ended(self, f"refused: {data[:300]!r}")
            self.close()
            return
        found = data.count(b"\n\n") + (tail[-1:] == b"\n" == data[:1])
        if found:
            now_s = time.monotonic()
            if not self.first_s:
                self.first_s = now_s
                self.started(self)
            if self.arrivals_s is not None:
                self.arrivals_s.append(now_s)
        self.num_events += found
        self._tail = (tail + data)[-1000:] if len(data) < 1000 else data[-1000:]
        if self._tail.endswith(END_OF_BODY) and self._is_open:
            self._is_open = False
            self.ended(self, "" if self.num_events else f"not a stream: {self._tail[:200]!r}")

    def num_tokens(self) -> int:
        """Returns the number of tokens in the answer's usage."""
        found = _TOKENS.findall(self._tail)
        return int(found[-1]) if found else 0

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self._is_open = False
            self.ended(self, f"the connection ended in mid-answer: {exc or 'end of file'}; {self._tail[:200]!r}")

    def close(self) -> None:
        self._is_open = False
        if self._transport is not None:
            self._transport.abort()


class LoadGenerator:
    def __init__(self, spec: LoadSpec) -> None:
        self._spec, self._load = spec, spec.load
        self._idle: list[Client] = []
        self._clients: list[Client] = []
        self._num_sent = self._num_done = self._num_started = 0
        self._errors: list[str] = []
        self._gaps_s: list[float] = []
        self._finished = asyncio.Event()
        asked = b'{"model":"%s","messages":[{"role":"user","content":"%s"}],"max_completion_tokens":%d,'
        asked %= (spec.model.encode(), TEXT.encode(), self._load.num_tokens)
        self._body = asked + b'"stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,"seed":%d}'

    async def run(self) -> LoadResult:
        load, spec = self._load, self._spec
        rss_before = rss_nbytes(spec.pid)
        if not load.rate_per_s:  # connects first, so that no request includes it
            self._idle = [await self._connect() for _ in range(load.num_open)]
        before_s, waited_before_s = cpu_s(spec.pid), waited_s(spec.pid)
        own_before_s, started_s = time.process_time(), time.monotonic()
        try:
            async with asyncio.timeout(spec.deadline_s):
                arriving = asyncio.ensure_future(self._arrive() if load.rate_per_s else self._fill())
                await self._finished.wait()
                await arriving
                took_s = time.monotonic() - started_s
                if load.is_held:
                    await asyncio.sleep(SETTLE_S)
        except TimeoutError:
            took_s = time.monotonic() - started_s
            self._errors.append(f"{self._num_done} of {load.num_requests} within {spec.deadline_s:g} s")
        result = LoadResult(
            took_s=took_s,
            cpu_s=cpu_s(spec.pid) - before_s,
            own_cpu_s=time.process_time() - own_before_s,
            num_done=self._num_done,
            errors=self._errors,
            gaps_s=self._gaps_s,
            waited_s=waited_s(spec.pid) - waited_before_s,
            rss_before_nbytes=rss_before,
            rss_after_nbytes=rss_nbytes(spec.pid),
        )
        for client in self._clients:
            client.close()
        return result

    async def _fill(self) -> None:
        """Keeps `num_open` requests open: starts that many, and another one whenever one ends."""
        for _ in range(min(self._load.num_open, self._load.num_requests)):
            self._send()
            if self._num_sent % 50 == 0:
                await asyncio.sleep(0)

    async def _arrive(self) -> None:
        """Starts requests of independent clients, with exponential times between them."""
        draw = random.Random(0)
        due_s = time.monotonic()
        while self._num_sent < self._load.num_requests:
            due_s += draw.expovariate(self._load.rate_per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not self._idle:
                self._idle.append(await self._connect())
            self._send()

    def _send(self) -> None:
        seed = self._spec.first_seed + self._num_sent
        self._num_sent += 1
        self._idle.pop().send(seed, self._request(seed))

    def _request(self, seed: int) -> bytes:
        body = self._body % seed
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)

    async def _connect(self) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(
            lambda: Client(self._started, self._ended), "127.0.0.1", self._spec.port
        )
        self._clients.append(client)
        return client

    def _started(self, client: Client) -> None:
        self._num_started += 1
        if self._load.is_held and self._num_started == self._load.num_open:
            self._finished.set()

    def _ended(self, client: Client, error: str) -> None:
        wanted, told = self._load.num_tokens, client.num_tokens()
        if not error and told != wanted:
            error = f"{told} tokens instead of {wanted}; {client.num_events} events"
        if error and len(self._errors) < MAX_ERRORS:
            self._errors.append(error)
        self._num_done += 1
        if client.arrivals_s:
            self._gaps_s += [later - earlier for earlier, later in itertools.pairwise(client.arrivals_s)]
        if not error:
            self._idle.append(client)
        if self._num_done >= self._load.num_requests or (error and self._load.is_held):
            self._finished.set()
        elif not self._load.rate_per_s and self._num_sent < self._load.num_requests and self._idle:
            self._send()


def main() -> None:
    spec, result_file = given_spec(LoadSpec)
    raise_open_files()
    result = uvloop.run(LoadGenerator(spec).run())
    result_file.write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
