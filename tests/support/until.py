"""Waiting in an event loop for what the test's own process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], pause_s: float = 0.0) -> None:
    """Returns once `condition()` is true; the test's own limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(pause_s)
