"""Lets a program's requests wait for capacity where a server would refuse them and ask clients to try again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pd_cluster.errors import NoCapacity

T = TypeVar("T")

MOST_S = 3600.0


async def when_capacity_frees(work: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of `work`. Tries again, for at most an hour, while it raises NoCapacity."""
    end_s = asyncio.get_running_loop().time() + MOST_S
    while True:
        try:
            return await work()
        except NoCapacity as error:
            if asyncio.get_running_loop().time() >= end_s:
                raise
            await asyncio.sleep(error.retry_after_s)
