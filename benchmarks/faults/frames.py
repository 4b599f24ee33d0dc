"""Strangers of `benchmarks faults`: malformed messages, at every TCP port on which the cluster listens.

The scheduler's messages to a worker are recorded once, from a real handshake with the cluster's own key through a
relay. Strangers can then repeat them: whole, in parts, changed, and to other processes. HTTP is treated in the same
way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.faults.leaving import connect, each, request_of, reset
from benchmarks.faults.ports import Listener, listeners
from pd_cluster import wire
from pd_cluster.client.streaming import CONNECT_TIMEOUT_S
from pd_cluster.errors import PdClusterError
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.settings.config import Credentials
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools.keys import SCHEDULER_KEY_FILE, SECRET_FILE, read_scheduler_key, read_secret

if TYPE_CHECKING:
    from benchmarks.faults.terms import Means

NUM_FRAMES = 4000
AT_ONCE_AT_A_PORT = 3  # the admin port accepts few connections, and the measurement needs one
HEARD_S = 0.05  # how long a stranger listens before it leaves
OVERSIZED_NBYTES = 1 << 20
GREETING_NBYTES = 64  # of ZMTP
LONG_FRAME = b"\x02" + (1 << 40).to_bytes(8, "big")  # of ZMTP: a terabyte follows


async def frames(means: Means) -> str:
    """Sends random, garbled, truncated, oversized and replayed bytes, each kind to each port."""
    ports = listeners(means.stage.pids())
    spoken = await recorded(means)
    http = [
        b"".join(request_of(means, 4)),
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /instance HTTP/1.0\r\n\r\n",
    ]
    places: dict[Listener, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE_AT_A_PORT))

    async def one(number: int) -> str:
        port = ports[number % len(ports)]
        kind, make = KINDS[number // len(ports) % len(KINDS)]
        data = make(means.rng, [*http, *spoken])
        async with places[port]:
            await say(port, data, means.rng.random() < 0.5)
        return kind

    said = await each(means.count(NUM_FRAMES), one)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(said.items()))
    return f"{said.total():,} strangers at {len(ports)} ports: {kinds}; {sum(map(len, spoken)):,} bytes were recorded"


async def say(port: Listener, data: bytes, is_reset: bool) -> None:
    """Sends data; the port may cut the connection."""
    reader, writer = await connect(port.host, port.port)
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            await asyncio.wait_for(writer.drain(), CONNECT_TIMEOUT_S)
            await asyncio.wait_for(reader.read(1 << 16), HEARD_S)
    finally:
        if is_reset:
            reset(writer)
        else:
            writer.close()


# ---- kinds


def garbled(rng: random.Random, known: list[bytes]) -> bytes:
    """Changes a few bytes of a valid message."""
    data = bytearray(rng.choice(known))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def truncated(rng: random.Random, known: list[bytes]) -> bytes:
    data = rng.choice(known)
    return data[: rng.randrange(len(data))]


def oversized(rng: random.Random, known: list[bytes]) -> bytes:
    """Returns a head without an end, a body beyond every limit, or a terabyte message after a real greeting."""
    endless = b"GET / HTTP/1.1\r\nx: " + bytes(rng.choices(range(33, 127), k=1000)) * (OVERSIZED_NBYTES // 1000)
    body = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 60}\r\n\r\n".encode() + b"{" * 1000
    greeting = known[-1][:GREETING_NBYTES] + LONG_FRAME + rng.randbytes(1000)
    return rng.choice([endless, body, greeting])


def replayed(rng: random.Random, known: list[bytes]) -> bytes:
    """Returns messages word for word, or in an order that no peer would use."""
    if rng.random() < 0.5:
        return rng.choice(known)
    return b"".join(rng.sample(known, len(known)))


def random_bytes(rng: random.Random, known: list[bytes]) -> bytes:
    return rng.randbytes(rng.choice([1, 8, 64, 1000, 100_000]))


KINDS: tuple[tuple[str, Callable[[random.Random, list[bytes]], bytes]], ...] = (
    ("random", random_bytes),
    ("garbled", garbled),
    ("truncated", truncated),
    ("oversized", oversized),
    ("replayed", replayed),
)


# ---- recording a handshake


class Opened:
    """The owner of the recording mailbox: it waits for a connection, and ignores all else."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_open = self.loop.create_future()

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self.loop.call_soon_threadsafe(self._end, None)

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None: ...

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self.loop.call_soon_threadsafe(self._end, PdClusterError(f"no handshake was recorded: {reason}"))

    def on_fatal(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self._end, error)

    def load(self) -> None:
        return None

    def _end(self, error: BaseException | None) -> None:
        if not self.is_open.done():
            self.is_open.set_result(None) if error is None else self.is_open.set_exception(error)


async def recorded(means: Means) -> list[bytes]:
    """Returns each side's messages of a handshake between a scheduler and a worker, the scheduler's last."""
    entry = (await means.stage.instances())[0]
    info = await means.stage.instance(entry["host"], entry["port"])
    folder = means.stage.folder
    known = read_secret(folder / SECRET_FILE)
    credentials = Credentials(known.secret, known.schedulers, read_scheduler_key(folder / SCHEDULER_KEY_FILE))
    heard: dict[str, bytearray] = {"worker": bytearray(), "scheduler": bytearray()}
    tasks: set[asyncio.Task[None]] = set()

    async def copy(side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                heard[side] += data
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_worker = await connect(entry["host"], info.control_port)
        tasks.add(asyncio.ensure_future(copy("scheduler", reader, to_worker[1])))
        tasks.add(asyncio.ensure_future(copy("worker", to_worker[0], writer)))

    opened = Opened()
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    mailbox = Mailbox("recorder", secrets.randbits(62), "scheduler", credentials, Timeouts())
    mailbox.start(opened)
    try:
        port = server.sockets[0].getsockname()[1]
        mailbox.connect(info.name, info.epoch, "127.0.0.1", port, info.public_key)
        await asyncio.wait_for(opened.is_open, 2 * CONNECT_TIMEOUT_S)
    finally:
        await asyncio.to_thread(mailbox.close)
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [bytes(heard["worker"]), bytes(heard["scheduler"])]
