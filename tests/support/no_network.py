"""Runs a command in a network namespace with loopback only, from which it can reach one server on this host.

The server has the same port inside. A relay on each side forwards connections through a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
UNSHARE = ("unshare", "--map-root-user", "--net")


def is_possible() -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    return False


def run_without_network(
    port: int, command: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`port`: the server's port on 127.0.0.1. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "relay")
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def begin() -> asyncio.Server:
            return await asyncio.start_unix_server(_relay(lambda: asyncio.open_connection("127.0.0.1", port)), path)

        server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
        inside = [*UNSHARE, sys.executable, __file__, path, str(port), *command]
        try:
            return subprocess.run(
                inside, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


def _relay(connect: Callable[[], Awaitable[Streams]]) -> Callable[..., Awaitable[None]]:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await connect()
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))

    return relay


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _inside(path: str, port: int, command: Sequence[str]) -> int:
    """Runs the inner relay and the command in the namespace."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    async with await asyncio.start_server(_relay(lambda: asyncio.open_unix_connection(path)), "127.0.0.1", port):
        process = await asyncio.create_subprocess_exec(*command, env=os.environ)
        return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_inside(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
