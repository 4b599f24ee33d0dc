"""Lets a caller's event loop read a generator that runs on the engine's loop. Knows nothing of its items."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TypeVar

from pd_cluster.offline.offline_service import OfflineService

T = TypeVar("T")

END_TIMEOUT_S = 10.0  # the time for cancelled work to end


class Stopped(Exception):
    """A caller other than the reader cancelled the work."""


async def bridged(
    offline: OfflineService, items: AsyncGenerator[T, None], started: Callable[[Future[None]], None]
) -> AsyncGenerator[T, None]:
    """Yields the items. `started` receives the work's future; if that future is cancelled, raises Stopped.

    `items` is always closed at the end.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    def put(item: tuple[T] | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop has ended
            loop.call_soon_threadsafe(queue.put_nowait, item)

    has_begun = False

    async def pump() -> None:
        nonlocal has_begun
        has_begun = True
        last: BaseException | None = None
        try:
            async with contextlib.aclosing(items):
                async for item in items:
                    put((item,))
        except asyncio.CancelledError:
            last = Stopped()
            raise
        except Exception as error:  # the reader raises it
            last = error
        finally:
            put(last)

    work = offline.start(pump())
    # Work that is cancelled before it begins never runs, so it cannot report its end.
    work.add_done_callback(lambda _: None if has_begun else put(Stopped()))
    started(work)
    has_ended = False
    try:
        while (found := await queue.get()) is not None:
            if isinstance(found, BaseException):
                has_ended = True
                raise found
            yield found[0]
        has_ended = True
    finally:
        if not has_ended:
            work.cancel()
            await _until_end(queue)


async def _until_end(queue: asyncio.Queue[tuple[T] | BaseException | None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_TIMEOUT_S):
            while isinstance(await queue.get(), tuple):
                pass
