"""Many requests from a file, each answered as the HTTP API would answer it. Knows nothing of files or of terminals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from pd_cluster.errors import InstanceLost, PdClusterError, RequestError, Unavailable
from pd_cluster.offline.batch_lines import CHAT_URL, BatchEntry, error_of, line_of
from pd_cluster.service.answers.answers import Answer
from pd_cluster.service.answers.chat_answer import ChatAnswer
from pd_cluster.service.answers.completion_answer import CompletionAnswer
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.parse import parse
from pd_cluster.service.schema.protocol import CompletionRequest, GenerationRequest
from pd_cluster.service.service import TextService
from pd_cluster.service.status import error_body, status_of

log = logging.getLogger(__name__)

MAX_NBYTES = 256 << 20  # of lines being processed, so that huge ones follow one another
NUM_TRIES = 60  # to have a request's guide checked, while those of others are


@dataclass(slots=True)
class Counts:
    """The counts of this run."""

    num_done: int = 0
    num_failed: int = 0  # of these, with a status other than 200
    num_output_tokens: int = 0
    first_failure: str = ""  # "line 3, custom_id 'a': what was wrong"


class Batch:
    """`write` receives each answer's line, in the order in which they are ready; its exceptions end the batch."""

    def __init__(self, service: TextService, write: Callable[[bytes], None], concurrency: int) -> None:
        self._service = service
        self._write = write
        self._concurrency = concurrency
        self._name = uuid4().hex
        self.counts = Counts()

    async def run(self, entries: Iterator[BatchEntry]) -> None:
        """Reads on only when there is room. Raises Unavailable or InstanceLost when no instance is left to answer.

        If it is cancelled or fails, some requests have no answer, but none has part of one.
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
            answer, body = await self._answer(entry)
        except (Unavailable, InstanceLost):
            raise
        except Exception as error:  # as in the API: an error affects only its own request
            if not isinstance(error, PdClusterError):
                log.error("line %d, custom_id %r: %s", entry.number, entry.custom_id, error, exc_info=error)
            self._done(
                line_of(entry, status_of(error), msgspec.json.encode(error_body(error))), 0, _failure(entry, error)
            )
            return
        num_tokens = sum(each.usage["completion_tokens"] for each in answer.generations)
        self._done(line_of(entry, 200, body), num_tokens)

    def _done(self, line: bytes, num_tokens: int, failure: str = "") -> None:
        self._write(line)
        self.counts.num_done += 1
        self.counts.num_failed += bool(failure)
        self.counts.first_failure = self.counts.first_failure or failure
        self.counts.num_output_tokens += num_tokens

    async def _answer(self, entry: BatchEntry) -> tuple[Answer, bytes]:
        """Returns an answer and its body. Raises RequestError and the like."""
        answer = await self._begun(entry)
        for generation in answer.generations:
            generation.client_id = answer.id
            generation.amend(batch=self._name)
        pieces = await self._service.complete(answer.generations)

        def encoded() -> bytes:
            return msgspec.json.encode(answer.whole(pieces))

        return answer, await asyncio.to_thread(encoded) if answer.is_large else encoded()

    async def _begun(self, entry: BatchEntry) -> Answer:
        for at in range(NUM_TRIES):
            try:
                return await (self._chat(entry.body) if entry.url == CHAT_URL else self._completion(entry.body))
            except Unavailable as error:  # a server's client would retry, too
                if at == NUM_TRIES - 1:
                    raise
                await asyncio.sleep(error.retry_after_s)
        raise AssertionError("the last try returns or raises")

    async def _chat(self, body: bytes) -> Answer:
        request = parse(body, ChatCompletionRequest)
        _check_whole(request)
        name = self._service.names.check(request.model)
        return ChatAnswer(request, name, self._service, await self._service.chat(request))

    async def _completion(self, body: bytes) -> Answer:
        request = parse(body, CompletionRequest)
        _check_whole(request)
        name = self._service.names.check(request.model)
        return CompletionAnswer(request, name, self._service, await self._service.completions(request))


def _check_whole(request: GenerationRequest) -> None:
    if request.stream:
        raise RequestError("stream: true has no place in a batch, whose answers are whole; leave it out", "stream")


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
