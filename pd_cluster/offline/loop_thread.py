"""An event loop on a separate thread, for synchronous callers. Knows nothing of the work that runs on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pd_cluster.errors import Closed

T = TypeVar("T")

END_TIMEOUT_S = 10.0  # the time for cancelled work to end


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(thread_name_prefix=name)  # for blocking calls
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts work and returns a future of its result. Raises Closed."""
        self._check_open(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the work's result. If Ctrl-C ends the wait, cancels the work and waits for its end."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("called from the engine's own event loop, which would wait for itself; await instead")
        self._check_open(work)
        ended = threading.Event()
        future = self.start(_signalled(work, ended))
        try:
            return future.result()
        except CancelledError:
            raise Closed("the engine was closed before the work was done") from None
        finally:
            if not future.done():
                future.cancel()
                ended.wait(END_TIMEOUT_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._executor.shutdown(cancel_futures=True)
        self._loop.close()

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._is_closed:
            work.close()
            raise Closed("this engine is closed; make a new one")

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields the items. Later items may be computed before the caller asks for them."""
        try:
            while (item := self.run(_next(items))) is not None:
                yield item[0]
        finally:
            if self._is_closed:
                pass
            elif threading.current_thread() is self._thread:  # an abandoned reader may be collected on any thread
                self.start(_close(items))
            else:
                self.run(_close(items))

    def close(self) -> None:
        """Cancels running work, waits for it and ends the thread; further calls do nothing."""
        if self._is_closed:
            return
        self.end(_nothing())
        self._thread.join(END_TIMEOUT_S)

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs `last` and then closes, without waiting for either."""
        if self._is_closed:
            last.close()
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end(last), self._loop)


async def _signalled(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


async def _next(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    async for item in items:
        return (item,)
    return None


async def _close(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


async def _nothing() -> None: ...


async def _end(last: Coroutine[Any, Any, None]) -> None:
    loop = asyncio.get_running_loop()
    try:
        await last
    finally:
        await _cancel_all()
        loop.call_soon(loop.stop)


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_TIMEOUT_S / 2)
    await loop.shutdown_asyncgens()
