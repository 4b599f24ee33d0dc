"""A child process that runs one job after another over a socket. Knows nothing of clients, places or deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os

NICE = 3  # the niceness of a child, so that the engine's threads have priority
MAX_LINE_NBYTES = 64 << 20
BODY = b"#"  # begins a line with the number of bytes that follow it


class JobChild:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self.be_nice(NICE)

    async def exchange(self, line: bytes) -> bytes:
        """Sends a job and returns the answer. Raises EOFError if the child failed."""
        self._writer.write(line + b"\n")
        await self._writer.drain()
        try:
            answer = await self._reader.readline()
        except ValueError:  # the line is longer than any valid answer
            raise EOFError from None
        if not answer.endswith(b"\n"):
            raise EOFError
        if answer.startswith(BODY):  # followed by the number of bytes to read
            return answer + await self._reader.readexactly(min(int(answer[1:]), MAX_LINE_NBYTES))
        return answer

    def be_nice(self, nice: int) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        self._nice = nice

    def is_quick(self) -> bool:
        """Whether the child has the priority of quick jobs; restores it, if this process has the right to do so."""
        if self._nice == NICE:
            return True
        try:
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        except OSError:
            return False
        self._nice = NICE
        return True

    async def kill(self) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
