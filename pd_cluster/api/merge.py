"""Several asynchronous generators or results as one. Knows nothing of what they give."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

MAX_WAITING = 1024  # items that nobody has taken; then the generators wait


def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all, in the order in which they come. The first error ends all of them, and so does closing this."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(MAX_WAITING)
    tasks = [asyncio.ensure_future(_pump(stream, items)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            item = await items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results. The first error ends all of them."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], items: asyncio.Queue[tuple[T] | BaseException | None]) -> None:
    """Ends with None, or with the error that ended the stream."""
    last: BaseException | None = None
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await items.put((item,))
    except Exception as error:
        last = error
    await items.put(last)
