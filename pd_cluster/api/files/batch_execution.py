"""Runs one batch from its current state to its end. States and files: docs/protocol/requests.md, "Batches"."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, BinaryIO, ParamSpec, TypeVar

from pd_cluster.api.files.line_answers import LineAnswer, LineAnswers
from pd_cluster.errors import RequestNotFound, Unauthorized
from pd_cluster.service.files.batch_journal import BatchJournal
from pd_cluster.service.files.batch_lines import BatchEntry, entries_of, unanswered_line
from pd_cluster.service.files.batch_states import BatchError, BatchObject, KeptBatch, RequestCounts
from pd_cluster.service.files.batch_store import BatchStore
from pd_cluster.service.files.batch_validation import check_entries

P = ParamSpec("P")
T = TypeVar("T")
LOOK_EVERY_S = 1.0
READ_AT_ONCE, READ_NBYTES = 32, 1 << 20  # maximum number of lines that are read together, and of their bytes
MOST_NBYTES = 64 << 20  # maximum number of bytes of requests that are being answered or wait
WHY_EXPIRED = "This request could not be executed before the completion window expired."
WHY_CANCELLED = "This request was not executed, because its batch was cancelled."
WHY_FULL = "There is no room for the answer: the files of this key use its whole quota; delete some."
GIVEN_UP = {"expired": ("batch_expired", WHY_EXPIRED), "cancelled": ("batch_cancelled", WHY_CANCELLED)}


class BatchExecution:
    """`run` raises StorageFull when the disk is full, and Unauthorized when the owner's last key is gone.

    Answers so far are kept even then, and a later execution continues the batch.
    """

    def __init__(
        self,
        store: BatchStore,
        batch_id: str,
        answers: LineAnswers,
        may_run: Callable[[str], bool] = lambda owner: True,
    ) -> None:
        """`may_run`: whether the batch's owner has a key."""
        self._store, self._id, self._answers, self._may_run = store, batch_id, answers, may_run
        self._most = store.files.config.batch_concurrency
        self._most_nbytes = 0  # maximum size of the batch's files under its owner's quota
        self._pending: set[asyncio.Future[Any]] = set()  # calls on threads

    async def run(self) -> None:
        kept = await self._on_thread(self._store.load, self._id)
        try:
            _, fd = await self._on_thread(self._store.files.open, kept.owner, kept.batch.input_file_id)
        except RequestNotFound:
            await self._on_thread(self._fail, kept)
            return
        with os.fdopen(fd, "rb") as source:
            try:
                if kept.batch.status == "validating" and not self._is_over(kept.batch):
                    kept = await self._on_thread(self._validated, kept.batch, source)
                if kept.batch.is_running:
                    await self._executed(kept, source)
            finally:
                await self._settled()

    def _validated(self, batch: BatchObject, source: BinaryIO) -> KeptBatch:
        num_lines, errors = check_entries(entries_of(source), batch.endpoint)
        if errors:
            return self._store.end(self._id, RequestCounts(), (None, None), errors)
        return self._store.note_begun(self._id, num_lines)

    def _fail(self, kept: KeptBatch) -> None:
        """Ends a batch whose input file was removed from the folder."""
        journal = BatchJournal(self._store.files, kept)
        try:
            gone = BatchError("file_not_found", "the input file is gone")
            self._store.end(self._id, journal.counts, journal.finished(), [gone])
        finally:
            journal.close()

    def _is_over(self, batch: BatchObject) -> bool:
        return batch.status == "cancelling" or batch.expires_at <= self._store.files.clock()

    async def _executed(self, kept: KeptBatch, source: BinaryIO) -> None:
        journal = await self._on_thread(BatchJournal, self._store.files, kept)
        try:
            if kept.batch.status == "in_progress":
                await self._until_over(kept, journal, source)
            await self._on_thread(self._end, journal, source)
        finally:
            await self._settled()
            journal.close()

    async def _settled(self) -> None:
        """Waits for running calls: none may write after the batch has ended here, or while another process runs it."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the call's result. A running call completes even if its caller is cancelled."""
        calling = asyncio.ensure_future(self._store.files.on_thread(call, *args, **kwargs))
        self._pending.add(calling)
        calling.add_done_callback(self._pending.discard)
        return await asyncio.shield(calling)

    async def _until_over(self, kept: KeptBatch, journal: BatchJournal, source: BinaryIO) -> None:
        """Returns when each request has an output line, the batch is cancelled, or its window is over."""
        await self._on_thread(self._note_progress, journal)
        answering = asyncio.ensure_future(self._answer_all(kept, journal, source))
        watching = asyncio.ensure_future(self._watch(journal))
        try:
            done, _ = await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            answering.cancel()
            watching.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
            await self._settled()

    async def _watch(self, journal: BatchJournal) -> None:
        """Returns when the batch is to end early."""
        while not self._is_over((kept := await self._on_thread(self._note_progress, journal)).batch):
            if not self._may_run(kept.owner):
                raise Unauthorized("its owner no longer has a key")
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_progress(self, journal: BatchJournal) -> KeptBatch:
        """Ensures that all answers so far are on disk, and updates their count."""
        journal.sync()
        kept, self._most_nbytes = self._store.note_progress(self._id, journal.counts, journal.nbytes)
        return kept

    async def _answer_all(self, kept: KeptBatch, journal: BatchJournal, source: BinaryIO) -> None:
        running: dict[asyncio.Task[None], int] = {}
        try:
            async for entry in self._entries(journal, source):
                while len(running) >= self._most or sum(running.values()) > MOST_NBYTES:
                    await _wait_for_one(running)
                running[asyncio.create_task(self._answer(kept, journal, entry))] = len(entry.body)
            while running:
                await _wait_for_one(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _entries(self, journal: BatchJournal, source: BinaryIO) -> AsyncIterator[BatchEntry]:
        """Yields the requests without an output line; reads them on a thread."""
        left = (entry for entry in entries_of(source) if not journal.has(entry))
        while some := await self._on_thread(_some_of, left):
            for entry in some:
                yield entry

    async def _answer(self, kept: KeptBatch, journal: BatchJournal, entry: BatchEntry) -> None:
        answer = None
        if sum(journal.nbytes.values()) < self._most_nbytes:
            answer = await self._answers.answer(kept, entry)
        if answer is None or sum(journal.nbytes.values()) + len(answer.line) > self._most_nbytes:
            answer = LineAnswer(unanswered_line(entry, "quota_exceeded", WHY_FULL), is_complete=False)
            self._most_nbytes = 0  # until the quota is read again
        await self._on_thread(journal.write, entry, *answer)

    def _end(self, journal: BatchJournal, source: BinaryIO) -> None:
        """Ends the batch; requests without an output line get an error."""
        batch = self._store.load(self._id).batch
        if batch.status == "in_progress" and journal.is_complete:
            batch = self._store.note_answered(self._id).batch
        if batch.status != "finalizing" and batch.in_progress_at is not None:
            journal.give_up(entries_of(source), *GIVEN_UP["cancelled" if batch.status == "cancelling" else "expired"])
        self._store.end(self._id, journal.counts, journal.finished())


def _some_of(entries: Iterator[BatchEntry]) -> list[BatchEntry]:
    found, nbytes = [], 0
    for entry in itertools.islice(entries, READ_AT_ONCE):
        found.append(entry)
        nbytes += len(entry.body)
        if nbytes > READ_NBYTES:
            break
    return found


async def _wait_for_one(running: dict[asyncio.Task[None], int]) -> None:
    """Waits until a task has ended. Raises its exception."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del running[task]
    for error in [task.exception() for task in done]:  # retrieves all exceptions, otherwise asyncio complains
        if error is not None:
            raise error
