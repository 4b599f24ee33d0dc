"""A scheduler's public port, as far as the endpoint picker asks it: it is well, and says how many requests it has."""

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
