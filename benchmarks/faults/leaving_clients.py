"""Clients of `benchmarks faults` that reset their connections, leave after a few tokens, or hardly read.

Each uses HTTP over its own socket, so that it can leave at any byte. Knows nothing of the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from benchmarks.mixed_load import NUM_TOKEN_IDS
from pd_cluster.client.streaming_client import CONNECT_TIMEOUT_S, REQUEST_DEADLINE_S
from pd_cluster.errors import PdClusterError

if TYPE_CHECKING:
    from benchmarks.faults.fault_types import FaultContext

NUM_RESETS, NUM_ABORTS = 4000, 5000
NUM_SLOW, NUM_DEAF = 24, 12
AT_ONCE = 12  # number of clients at a time
MOST_TOKENS = 32  # maximum number of tokens of a request whose client leaves
SLOW_TOKENS = 500  # with logprobs, more than the kernel buffers
SLOW_BUFFER_NBYTES = 4096
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time
TOKEN = b"\ndata: "


async def resets(context: FaultContext) -> str:
    """Resets connections before the end of the head, in the body, and in the answer."""

    async def one(_: int) -> str:
        head, body = request_of(context, context.rng.randint(1, MOST_TOKENS))
        where = context.rng.choice(("head", "body", "answer"))
        reader, writer = await connect(*context.stage.public)
        try:
            if where == "head":
                writer.write(head[: context.rng.randrange(len(head) - 4)])
            elif where == "body":
                writer.write(head + body[: context.rng.randrange(len(body))])
            else:
                writer.write(head + body)
                left = context.rng.randint(1, 4096)
                while left > 0 and (data := await asyncio.wait_for(reader.read(left), REQUEST_DEADLINE_S)):
                    left -= len(data)
        finally:
            reset(writer)
        return f"in the {where}"

    return _told("connections reset", await each(context.count(NUM_RESETS), one))


async def aborts(context: FaultContext) -> str:
    """Leaves half of the answers by resetting the connection, and half by closing it."""

    async def one(_: int) -> str:
        num_tokens = context.rng.randint(1, MOST_TOKENS)
        last = context.rng.randrange(num_tokens)
        reader, writer = await connect(*context.stage.public)
        end = reset if context.rng.random() < 0.5 else asyncio.StreamWriter.close
        try:
            writer.write(b"".join(request_of(context, num_tokens)))
            data = b""
            while data.count(TOKEN) < last or b"\r\n" not in data:
                more = await asyncio.wait_for(reader.read(1 << 16), REQUEST_DEADLINE_S)
                if not more:
                    break
                data += more
            if not data.startswith(b"HTTP/1.1 200 "):
                raise PdClusterError(f"a request whose client was about to leave got {data[:200]!r}")
        finally:
            end(writer)
        return "at once" if not last else "later"

    return _told("clients left", await each(context.count(NUM_ABORTS), one))


async def slow_readers(context: FaultContext) -> str:
    """Reads one byte a second, or nothing, of answers that are too large for any buffer; then leaves."""
    ends_s = time.monotonic() + context.stall_s
    connections: list[socket.socket] = []
    loop = asyncio.get_running_loop()

    async def one(number: int) -> bytes:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connections.append(connection)
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_NBYTES)
        await asyncio.wait_for(loop.sock_connect(connection, context.stage.public), CONNECT_TIMEOUT_S)
        await loop.sock_sendall(connection, b"".join(request_of(context, SLOW_TOKENS, logprobs=5)))
        data = b""
        while (left_s := ends_s - time.monotonic()) > 0:
            if number < NUM_SLOW:
                with contextlib.suppress(TimeoutError):
                    data += await asyncio.wait_for(loop.sock_recv(connection, 1), left_s)
            await asyncio.sleep(min(1.0, max(0.0, ends_s - time.monotonic())))
        return data

    try:
        read = await asyncio.gather(*(one(number) for number in range(NUM_SLOW + NUM_DEAF)))
    finally:
        for connection, is_reset in zip(connections, itertools.cycle((True, False)), strict=False):
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
    for data in read:
        if not b"HTTP/1.1 200 OK\r\n".startswith(data[:17]):
            raise PdClusterError(f"a client that reads slowly got {data!r}")
    return f"{NUM_SLOW} clients read {sum(map(len, read))} bytes in {context.stall_s:g} s, {NUM_DEAF} none"


# ---- shared helpers


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects. Raises OSError, TimeoutError."""
    return await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)


def reset(writer: asyncio.StreamWriter) -> None:
    """Resets the connection, so that the other end sees ECONNRESET, even if data are still in flight."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with contextlib.suppress(OSError):  # the other end closed first
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


def request_of(context: FaultContext, num_tokens: int, **more: object) -> tuple[bytes, bytes]:
    """Returns the head, with its empty line, and the body of a streamed request that is in no cache."""
    prompt = [context.rng.randrange(NUM_TOKEN_IDS) for _ in range(context.rng.randint(4, 64))]
    body = json.dumps({**context.probe, "prompt": prompt, "max_tokens": num_tokens, "stream": True, **more}).encode()
    host, port = context.stage.public
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


async def each(number: int, one: Callable[[int], Awaitable[str]], at_once: int = AT_ONCE) -> Counter[str]:
    """Calls `one` for each number below `number`, several at a time, and counts the results.

    Raises PdClusterError for an OSError.
    """
    waiting, said = iter(range(number)), Counter[str]()

    async def worker() -> None:
        for at in waiting:
            try:
                said[await one(at)] += 1
            except ConnectionError:
                said["cut off by the cluster"] += 1
            except (OSError, TimeoutError) as error:
                raise PdClusterError(f"client {at} of {number}: {error!r}") from error

    workers = [asyncio.ensure_future(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return said


def _told(what: str, said: Counter[str]) -> str:
    parts = ", ".join(f"{count:,} {where}" for where, count in sorted(said.items()))
    return f"{said.total():,} {what}: {parts}"
