"""Waits in an event loop for a condition in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], pause_s: float = 0.0) -> None:
    """Returns once `condition()` is true; has no deadline except the test's own."""
    while not condition():
        await asyncio.sleep(pause_s)
