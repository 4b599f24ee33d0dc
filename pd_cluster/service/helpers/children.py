"""Runs work that may never end, or take all memory, in child processes that have a deadline.

A child is `python -m MODULE FD`; FD is one end of a socket pair. The child reads its settings, then one job per line;
it writes a line when it is ready, and one per job, which may announce bytes that follow. Children are started on
demand, reused, and killed when a job takes too long. Independent of what the jobs are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable

from pd_cluster.errors import NoRoom, PdClusterError

log = logging.getLogger(__name__)

MAX_CHILDREN = 2  # that run quick jobs at a time
MAX_SLOW = 2  # that continue slow jobs beside them
QUICK_S = 0.5
START_TIMEOUT_S = 60.0  # to import, and to read a tokenizer
MAX_LINE_NBYTES = 64 << 20
BODY = b"#"  # begins a line that says how many bytes follow it


def _fine(line: bytes) -> None:
    """Accepts a child that is always ready."""


class TookTooLong(PdClusterError):
    """The child was killed because it exceeded its deadline."""


class Broke(PdClusterError):
    """A new child ended by itself while it did the job."""


class Children:
    """`name` is what they check, for messages. `started` checks a new child's first line, and may raise.

    Most jobs are quick. A slow one gives up its place after QUICK_S and continues beside the quick ones if not too many
    do so already, so slow jobs do not delay quick ones. `num_killed` counts children that took too long, had no place
    to continue, or broke.
    """

    def __init__(
        self,
        module: str,
        settings: bytes,
        timeout_s: float,
        name: str,
        started: Callable[[bytes], None] = _fine,
        quick_s: float | None = QUICK_S,
    ) -> None:
        """`quick_s` None: every job keeps its place until its deadline, and others wait for it."""
        self._module = module
        self._settings = settings
        self._timeout_s = timeout_s
        self._name = name
        self._started = started
        self._quick_s = timeout_s if quick_s is None else min(quick_s, timeout_s)
        self._quick = asyncio.Semaphore(MAX_CHILDREN)
        self._num_slow = 0
        self._idle: list[_Child] = []
        self.num_killed = 0

    async def ask(self, job: bytes) -> bytes:
        """Returns the answer's line. Raises TookTooLong, Broke, or NoRoom when no child was free in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._quick.acquire()
        except TimeoutError:
            raise NoRoom(f"no {self._name} could be checked for {self._timeout_s:g} s; try again") from None
        place = _Place(self._quick)
        try:
            return await self._try(job, place)
        finally:
            place.leave()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().kill()

    async def _try(self, job: bytes, place: _Place) -> bytes:
        """Runs a job. An idle child may have broken earlier: then a new one repeats the job."""
        child = self._idle.pop() if self._idle else None
        if child is not None:
            with contextlib.suppress(ConnectionError, EOFError):
                return await self._ask(child, job, place)
        child = await self._start()
        try:
            return await self._ask(child, job, place)
        except (ConnectionError, EOFError):
            raise Broke(f"the process that checks a {self._name} ended") from None

    async def _ask(self, child: _Child, job: bytes, place: _Place) -> bytes:
        """Runs a job; the child is idle or dead afterwards. Raises EOFError or ConnectionError when it broke."""
        answer = b""
        task = asyncio.ensure_future(child.exchange(job))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._quick_s)
            if not done and self._quick_s == self._timeout_s:
                raise self._too_long()
            if not done:
                answer = await self._go_on(task, place)
            else:
                answer = task.result()
        finally:
            task.cancel()
            if not answer:
                self.num_killed += 1
                await child.kill()
            elif len(self._idle) < MAX_CHILDREN:
                self._idle.append(child)
            else:
                await child.kill()
        return answer

    async def _go_on(self, task: asyncio.Future[bytes], place: _Place) -> bytes:
        """Waits until the deadline in a place for slow jobs. Raises TookTooLong, NoRoom."""
        if self._num_slow >= MAX_SLOW:
            raise NoRoom(f"{MAX_SLOW} slow {self._name}s are being checked; try again")
        self._num_slow += 1
        place.leave()
        try:
            await asyncio.wait({task}, timeout=max(0.0, self._timeout_s - self._quick_s))
        finally:
            self._num_slow -= 1
        if not task.done():
            raise self._too_long()
        return task.result()

    def _too_long(self) -> TookTooLong:
        return TookTooLong(f"not ready after {self._timeout_s:g} s")

    async def _start(self) -> _Child:
        """Starts a child that is ready for jobs."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
            undo.pop_all()
        child = _Child(process, *await asyncio.open_connection(sock=ours, limit=MAX_LINE_NBYTES))
        is_ready = False
        try:
            self._started(await asyncio.wait_for(child.exchange(self._settings), START_TIMEOUT_S))
            is_ready = True
        except (TimeoutError, ConnectionError, EOFError):
            log.error("the process that checks a %s did not start within %g s", self._name, START_TIMEOUT_S)
            raise NoRoom(f"no {self._name} can be checked right now; the server's log has the details") from None
        finally:
            if not is_ready:
                await child.kill()
        return child


class _Place:
    """A place among the quick jobs, left once."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places: asyncio.Semaphore | None = places

    def leave(self) -> None:
        if self._places is not None:
            self._places.release()
            self._places = None


class _Child:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    async def exchange(self, line: bytes) -> bytes:
        """Sends a job and returns the answer. Raises EOFError when the child broke."""
        self._writer.write(line + b"\n")
        await self._writer.drain()
        try:
            answer = await self._reader.readline()
        except ValueError:  # longer than any valid answer
            raise EOFError from None
        if not answer.endswith(b"\n"):
            raise EOFError
        if answer.startswith(BODY):  # and its number of bytes, which follow
            return answer + await self._reader.readexactly(min(int(answer[1:]), MAX_LINE_NBYTES))
        return answer

    async def kill(self) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
