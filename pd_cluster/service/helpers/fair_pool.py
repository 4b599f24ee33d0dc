"""A few threads for work that would block the event loop, shared fairly among clients.

However much one client sends, another's work waits only for running work and for one piece of each client before it.
Memory of large pieces is given back when nothing waits. Independent of what the work is.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

NUM_THREADS = 2
LARGE = 1 << 18  # characters, tokens or the like in finished work; from here on memory is given back
GIVE_BACK_AFTER_S = 1.0  # of rest, so that the answers are freed, too

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    size: int
    result: Future[Any] = field(default_factory=Future)


class FairPool:
    """May be used from several event loops, one after another."""

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        give_back: Callable[[], None] | None = None,
        give_back_after_s: float = GIVE_BACK_AFTER_S,
    ) -> None:
        """`give_back` returns the process's free memory to the system."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="fair-pool")
        self._give_back = give_back or give_memory_back
        self._give_back_after_s = give_back_after_s
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # client -> its work; next turn first
        self._num_running = 0
        self._size_done = 0  # since memory was last given back
        self._giving_back: threading.Timer | None = None
        self._is_closed = False

    async def run(self, client: str, work: Callable[[], T], size: int = 0) -> T:
        """Returns or raises the outcome of `work`. Work whose caller is cancelled before its turn never runs."""
        job = _Job(work, size)
        with self._lock:
            self._waiting.setdefault(client, deque()).append(job)
        self._threads.submit(self._take_turn)  # one call per piece; it runs the piece whose turn it is
        result: T = await asyncio.wrap_future(job.result)
        return result

    def close(self) -> None:
        """Cancels waiting work, and does not wait for running work; threads without any have ended on return."""
        with self._lock:
            jobs = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            is_idle, self._is_closed = not self._num_running, True
            if self._giving_back is not None:
                self._giving_back.cancel()
        self._threads.shutdown(wait=is_idle, cancel_futures=True)
        for job in jobs:
            job.result.cancel()

    def _take_turn(self) -> None:
        job = self._next()
        if job is None:
            return
        if job.result.set_running_or_notify_cancel():
            try:
                result = job.work()
            except BaseException as error:  # it belongs to the caller
                job.result.set_exception(error)
            else:
                job.result.set_result(result)
                del result
        self._ended(job.size)

    def _next(self) -> _Job | None:
        with self._lock:
            if not self._waiting:  # closed
                return None
            client, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            if jobs:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._num_running += 1
            return job

    def _ended(self, size: int) -> None:
        with self._lock:
            self._num_running -= 1
            self._size_done += size
            is_idle = not self._waiting and not self._num_running
            if is_idle and self._size_done >= LARGE and not self._is_closed:
                self._size_done = 0
                self._giving_back = threading.Timer(self._give_back_after_s, self._give_back)
                self._giving_back.daemon = True
                self._giving_back.start()


def give_memory_back() -> None:
    """Returns memory that threads have freed but glibc keeps; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
