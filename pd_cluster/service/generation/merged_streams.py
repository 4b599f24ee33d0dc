"""Merges several asynchronous generators or results into one. Independent of their items."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

SETTLE_S = 1.0  # the time for the other generators to end after a failure
NUM_A_TURN = 16  # generators to start before other tasks get a turn
MAX_WAITING = 1024  # the most items that were not taken yet; beyond that, the generators wait


def _ignore_error(error: BaseException) -> None:
    """Ignores the error."""


def merged(
    streams: Sequence[AsyncGenerator[T, None]], failed: Callable[[BaseException], None] = _ignore_error
) -> AsyncGenerator[T, None]:
    """Yields the items of all generators as they arrive. Closing the result closes them all.

    The first error ends all generators; `failed` receives it before they are cancelled, so that they can end cleanly.
    """
    return streams[0] if len(streams) == 1 else _merged(streams, failed)


async def _merged(
    streams: Sequence[AsyncGenerator[T, None]], failed: Callable[[BaseException], None]
) -> AsyncGenerator[T, None]:
    items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(MAX_WAITING)
    tasks: list[asyncio.Future[None]] = []
    num_running = len(streams)
    try:
        for at, stream in enumerate(streams):
            tasks.append(asyncio.ensure_future(_pump(stream, items)))
            if at % NUM_A_TURN == NUM_A_TURN - 1:
                await asyncio.sleep(0)
        while num_running:
            item = await items.get()
            if isinstance(item, BaseException):
                failed(item)
                await asyncio.wait(tasks, timeout=SETTLE_S)
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item[0]
    finally:
        await _end(tasks)


async def together(
    works: Sequence[Coroutine[Any, Any, T]], failed: Callable[[BaseException], None] = _ignore_error
) -> list[T]:
    """Returns all results. The first error ends all of them, as with `merged`."""
    if len(works) == 1:
        return [await works[0]]
    tasks: list[asyncio.Future[T]] = []
    try:
        for at, work in enumerate(works):
            tasks.append(asyncio.ensure_future(work))
            if at % NUM_A_TURN == NUM_A_TURN - 1:
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    except Exception as error:
        failed(error)
        await asyncio.wait(tasks, timeout=SETTLE_S)
        raise
    finally:
        for work in works[len(tasks) :]:
            work.close()
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], items: asyncio.Queue[tuple[T] | BaseException | None]) -> None:
    """Forwards a stream's items, then None or the error that ended it."""
    last: BaseException | None = None
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await items.put((item,))
    except Exception as error:
        last = error
    await items.put(last)
