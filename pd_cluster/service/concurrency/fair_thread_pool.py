"""A few threads for work that would block the event loop, shared fairly among clients (fair_slots.py).

After large pieces of work, returns free memory to the system once no work waits. Independent of the kind of work.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from pd_cluster.service.concurrency.fair_slots import FairSlots, current_client

NUM_THREADS = 3
LARGE = 1 << 18  # memory is returned after finished work of this size, in characters, tokens or the like
GIVE_BACK_AFTER_S = 1.0  # the idle time before memory is returned, so that answers have been freed, too

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Task:
    work: Callable[[], Any]
    size: int
    result: Future[Any] = field(default_factory=Future)


class FairThreadPool(ThreadPoolExecutor):
    """An executor that may serve several event loops in succession; also usable as a loop's default executor."""

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        give_back: Callable[[], None] | None = None,
        give_back_after_s: float = GIVE_BACK_AFTER_S,
        name: str = "fair-pool",
    ) -> None:
        """`give_back` returns the process's free memory to the system."""
        super().__init__(num_threads, thread_name_prefix=name)
        self._give_back = give_back or give_memory_back
        self._give_back_after_s = give_back_after_s
        self._lock = threading.Lock()
        self._clients: FairSlots[_Task] = FairSlots(num_threads)
        self._size_done = 0  # the size of work finished since memory was last given back
        self._giving_back: threading.Timer | None = None
        self._is_closed = False

    async def run(self, client: str, work: Callable[[], T], size: int = 0) -> T:
        """Returns or raises the result of `work`. Work whose caller is cancelled before its turn never runs."""
        result: T = await asyncio.wrap_future(self._join(client, _Task(work, size)))
        return result

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submits work of the current client, for `asyncio.to_thread` and the like."""
        return cast("Future[T]", self._join(current_client.get(), _Task(partial(fn, *args, **kwargs), 0)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shuts down like ThreadPoolExecutor; work of a cancelled future never runs."""
        if cancel_futures:
            with self._lock:
                jobs = self._clients.clear()
            for job in jobs:
                job.result.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def close(self) -> None:
        """Cancels waiting work; does not wait for running work. If no work runs, all threads have ended on return."""
        with self._lock:
            is_idle, self._is_closed = not self._clients.num_held, True
            if self._giving_back is not None:
                self._giving_back.cancel()
        self.shutdown(wait=is_idle, cancel_futures=True)

    def _join(self, client: str, job: _Task) -> Future[Any]:
        with self._lock:
            self._clients.join(client, job)
        try:
            super().submit(self._work)  # one call per piece; a call runs the pieces whose turn it is
        except RuntimeError:  # the pool was shut down
            with self._lock:
                self._clients.leave(client, job)
            raise
        return job.result

    def _work(self) -> None:
        """Runs pieces until none may begin: when a piece ends, its client may begin another."""
        while (turn := self._next()) is not None:
            client, job = turn
            if job.result.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as error:  # the caller gets the error
                    job.result.set_exception(error)
                else:
                    job.result.set_result(result)
                    del result
            self._ended(client, job.size)
            del turn, job

    def _next(self) -> tuple[str, _Task] | None:
        with self._lock:
            return self._clients.next()

    def _ended(self, client: str, size: int) -> None:
        with self._lock:
            self._clients.ended(client)
            self._size_done += size
            is_idle = not self._clients.num_waiting and not self._clients.num_held
            if is_idle and self._size_done >= LARGE and not self._is_closed:
                self._size_done = 0
                self._giving_back = threading.Timer(self._give_back_after_s, self._give_back)
                self._giving_back.daemon = True
                self._giving_back.start()


def give_memory_back() -> None:
    """Returns to the system the memory that threads have freed but glibc keeps; other C libraries lack such a call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
