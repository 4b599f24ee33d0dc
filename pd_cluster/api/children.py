"""Work that may never end, or take all memory, done where it can do no harm: in child processes that have a deadline.

A child is `python -m MODULE FD`; FD is one end of a socket pair. Down come its settings, then a job a line; up goes a
line when it is ready, and one a job. Children are started when they are first needed, used again, and killed when a
job takes too long. Knows nothing of what the jobs are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable

from pd_cluster.errors import PdClusterError, Unavailable

log = logging.getLogger(__name__)

MAX_CHILDREN = 2  # one job that takes long does not keep all others waiting
START_TIMEOUT_S = 60.0  # to import, and to read a tokenizer
MAX_LINE_NBYTES = 64 << 20


def _fine(line: bytes) -> None:
    """For children that are always ready."""


class TookTooLong(PdClusterError):
    """The child was killed for it."""


class Broke(PdClusterError):
    """A child that was new ended by itself while it did the job."""


class Children:
    """`name` is what they check, in messages. `started` judges a new child's first line, and may raise.

    `num_killed` counts those that took too long or broke.
    """

    def __init__(
        self, module: str, settings: bytes, timeout_s: float, name: str, started: Callable[[bytes], None] = _fine
    ) -> None:
        self._module = module
        self._settings = settings
        self._timeout_s = timeout_s
        self._name = name
        self._started = started
        self._free = asyncio.Semaphore(MAX_CHILDREN)
        self._idle: list[_Child] = []
        self.num_killed = 0

    async def ask(self, job: bytes) -> bytes:
        """The answer's line. Raises TookTooLong, Broke, Unavailable when none was free in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable(f"no {self._name} could be checked for {self._timeout_s:g} s; try again") from None
        try:
            return await self._try(job)
        finally:
            self._free.release()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().kill()

    async def _try(self, job: bytes) -> bytes:
        """A child that was there already may have been broken before: then a new one tells."""
        child = self._idle.pop() if self._idle else None
        if child is not None:
            with contextlib.suppress(ConnectionError, EOFError):
                return await self._ask(child, job)
        child = await self._start()
        try:
            return await self._ask(child, job)
        except (ConnectionError, EOFError):
            raise Broke(f"the process that checks a {self._name} ended") from None

    async def _ask(self, child: _Child, job: bytes) -> bytes:
        """The child is idle after it, or dead. Raises EOFError or ConnectionError when it broke."""
        answer = b""
        try:
            answer = await asyncio.wait_for(child.exchange(job), self._timeout_s)
        except TimeoutError:
            raise TookTooLong(f"not ready after {self._timeout_s:g} s") from None
        finally:
            if not answer:
                self.num_killed += 1
                await child.kill()
            else:
                self._idle.append(child)
        return answer

    async def _start(self) -> _Child:
        """Ready for jobs."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        child = _Child(process, *await asyncio.open_connection(sock=ours, limit=MAX_LINE_NBYTES))
        is_ready = False
        try:
            self._started(await asyncio.wait_for(child.exchange(self._settings), START_TIMEOUT_S))
            is_ready = True
        except (TimeoutError, ConnectionError, EOFError):
            log.error("the process that checks a %s did not start within %g s", self._name, START_TIMEOUT_S)
            raise Unavailable(f"no {self._name} can be checked right now; the server's log has the details") from None
        finally:
            if not is_ready:
                await child.kill()
        return child


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
        """Raises EOFError when the child broke."""
        self._writer.write(line + b"\n")
        await self._writer.drain()
        try:
            answer = await self._reader.readline()
        except ValueError:  # longer than any good answer
            raise EOFError from None
        if not answer.endswith(b"\n"):
            raise EOFError
        return answer

    async def kill(self) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
