"""Answers many requests as the HTTP API would. Knows nothing of files or terminals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

from pd_cluster.api.routes.in_process_api import ApiAnswer, InProcessApi
from pd_cluster.errors import InstanceLost, PdClusterError, Unavailable
from pd_cluster.offline.capacity_wait import when_capacity_frees
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.files.batch_lines import BatchEntry, error_of, line_of
from pd_cluster.service.text_service import TextService

log = logging.getLogger(__name__)

MAX_NBYTES = 256 << 20  # maximum bytes of the lines in progress: huge lines run one after another


@dataclass(slots=True)
class Counts:
    """The counts of this run."""

    num_done: int = 0
    num_failed: int = 0  # answers with a status other than 200
    num_output_tokens: int = 0
    first_failure: str = ""  # "line 3, custom_id 'a': the error"


class BatchRunner:
    """`write` receives the line of each answer when the answer is ready; its exceptions end the batch."""

    def __init__(self, service: TextService, write: Callable[[bytes], None], concurrency: int) -> None:
        self._calls = InProcessApi(service)
        self._caller = Caller(batch=uuid4().hex)
        self._write = write
        self._concurrency = concurrency
        self.counts = Counts()

    async def run(self, entries: Iterator[BatchEntry]) -> None:
        """Answers all entries, as capacity allows. Raises Unavailable or InstanceLost when no instance is left.

        If it is cancelled or fails, some requests have no answer, but none has part of an answer.
        """
        running: dict[asyncio.Task[None], int] = {}
        try:
            for entry in entries:
                while len(running) >= self._concurrency or sum(running.values()) > MAX_NBYTES:
                    await _wait_for_one(running)
                running[asyncio.create_task(self._serve(entry))] = len(entry.body)
                await asyncio.sleep(0)
            while running:
                await _wait_for_one(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _serve(self, entry: BatchEntry) -> None:
        if entry.error is not None:
            self._done(error_of(entry, entry.error), 0, _failure(entry, entry.error))
            return
        try:
            answer = await self._answer(entry)
        except (Unavailable, InstanceLost):
            raise
        except Exception as error:  # as in the API, an error affects only its own request
            if not isinstance(error, PdClusterError):
                log.error("line %d, custom_id %r: %s", entry.number, entry.custom_id, error, exc_info=error)
            self._done(error_of(entry, error), 0, _failure(entry, error))
            return
        self._done(line_of(entry, 200, answer.body), answer.num_output_tokens)

    def _done(self, line: bytes, num_tokens: int, failure: str = "") -> None:
        self._write(line)
        self.counts.num_done += 1
        self.counts.num_failed += bool(failure)
        self.counts.first_failure = self.counts.first_failure or failure
        self.counts.num_output_tokens += num_tokens

    async def _answer(self, entry: BatchEntry) -> ApiAnswer:
        """Raises RequestError and the like."""
        return await when_capacity_frees(lambda: self._calls.call(entry.url, entry.body, self._caller))


async def _wait_for_one(running: dict[asyncio.Task[None], int]) -> None:
    """Waits until a task has ended. Raises its exception."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del running[task]
    for error in [task.exception() for task in done]:  # retrieves all exceptions, otherwise asyncio complains
        if error is not None:
            raise error


def _failure(entry: BatchEntry, error: Exception) -> str:
    return f"line {entry.number}, custom_id {entry.custom_id!r}: {error}"
