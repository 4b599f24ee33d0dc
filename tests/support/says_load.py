"""A fake scheduler's public port for the endpoint picker: reports that it is healthy, and its number of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable


async def serve_load(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, load: Callable[[], int]) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            content = json.dumps({"server_load": load()})
            writer.write(f"HTTP/1.1 200 X\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())
