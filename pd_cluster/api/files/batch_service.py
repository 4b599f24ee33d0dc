"""Runs a folder's batches in the processes that serve the public port, each batch in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence

from pd_cluster.api.files.batch_execution import BatchExecution
from pd_cluster.api.files.line_answers import LineAnswers
from pd_cluster.errors import PdClusterError
from pd_cluster.service.files.batch_store import BatchStore, RunningBatch

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
RETRY_S = 10.0  # the time until a batch that had to stop, for example because the disk was full, is tried again
MOST_AT_ONCE = 8  # maximum number of running batches, without those that are about to end


class BatchService:
    def __init__(self, store: BatchStore, answers: LineAnswers, may_run: Callable[[str], bool]) -> None:
        """`may_run`: whether an owner's batches may run."""
        self._store, self._answers, self._may_run = store, answers, may_run
        self._mine: dict[str, RunningBatch] = {}
        self._not_before_s: dict[str, float] = {}
        self._has_news = asyncio.Event()
        self._last_problem = ""

    def look_now(self) -> None:
        """Makes `run` look for new batches at once."""
        self._has_news.set()

    async def run(self) -> None:
        """Runs until cancelled; leaves running batches to another process."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._has_news.clear()
                try:
                    await self._look(group)
                    self._last_problem = ""
                except (PdClusterError, sqlite3.Error) as error:
                    self._told(error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._has_news.wait()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Starts batches that no process runs."""
        files, now_s = self._store.files, asyncio.get_running_loop().time()
        running = await files.on_thread(self._store.running)
        known = {batch.id for batch in running}
        self._not_before_s = {each: at_s for each, at_s in self._not_before_s.items() if each in known}
        idle = [each for each in running if self._not_before_s.get(each.id, 0.0) <= now_s]
        idle = [each for each in idle if each.is_due or self._may_run(each.owner)]
        for batch in chosen(idle, self._mine, MOST_AT_ONCE):
            lock = await files.on_thread(self._store.take, batch.id)
            if lock is not None:
                self._mine[batch.id] = batch
                group.create_task(self._execute(batch.id, lock))
            if not batch.is_due and self._num_at_once >= MOST_AT_ONCE:
                break

    @property
    def _num_at_once(self) -> int:
        return sum(not batch.is_due for batch in self._mine.values())

    async def _execute(self, batch_id: str, lock: int) -> None:
        has_ended = False
        try:
            log.info("%s: this process runs it", batch_id)
            await BatchExecution(self._store, batch_id, self._answers, self._may_run).run()
            has_ended = True
            log.info("%s: it has ended", batch_id)
        except Exception as error:  # the error affects only this batch
            expected = isinstance(error, PdClusterError | sqlite3.Error | OSError)
            self._not_before_s[batch_id] = asyncio.get_running_loop().time() + RETRY_S
            log.error("%s: it continues in %g s: %s", batch_id, RETRY_S, error, exc_info=None if expected else error)
        finally:
            del self._mine[batch_id]
            self._store.release(batch_id, lock, has_ended)
            self._has_news.set()

    def _told(self, error: Exception) -> None:
        if str(error) != self._last_problem:
            log.error("cannot look for batches: %s", error)
        self._last_problem = str(error)


def chosen(running: Sequence[RunningBatch], mine: dict[str, RunningBatch], most: int) -> list[RunningBatch]:
    """Returns batches to start; other processes may already run some of them. Owners take turns, each with its oldest
    batch first.

    Batches that are about to end come first, without a limit.
    """
    counts = Counter(batch.owner for batch in mine.values() if not batch.is_due)
    rest = [batch for batch in running if batch.id not in mine]
    due = [batch for batch in rest if batch.is_due]
    if sum(counts.values()) >= most:
        return due
    ranked = []
    for batch in rest:
        if not batch.is_due:
            ranked.append((counts[batch.owner], batch))
            counts[batch.owner] += 1
    return due + [batch for _, batch in sorted(ranked, key=lambda each: each[0])]
