"""Runs work that may never end, or take all memory, in child processes that have a deadline.

A child is `python -m MODULE FD`; FD is one end of a socket pair. The child reads its settings, then one job per line;
it writes a line when it is ready, and one per job, which may announce bytes that follow. Children are started on
demand, reused, and killed when a job takes too long. Clients take turns (client_turns.py). Independent of what the jobs
are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from pd_cluster.errors import NoRoom, PdClusterError
from pd_cluster.service.helpers.client_turns import ClientTurns, current_client

log = logging.getLogger(__name__)

MAX_CHILDREN = 3  # that run quick jobs at a time
MAX_SLOW = 2  # that continue slow jobs beside them
MAX_WAITING = 64
QUICK_S = 0.5
NICE, SLOW_NICE = 3, 12  # added for a process, and for one whose job is slow: the engine's threads come first
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

    Most jobs are quick. A slow one gives up its place after QUICK_S and continues beside the quick ones, so that they
    do not wait for it. When `max_slow` do so already, the client that has most of them loses its latest one, if it
    has at least two more than the newcomer's; otherwise the newcomer ends, and its client rests for twice the time that
    was lost. A slow job ends when its client leaves. `num_killed` counts children that took too
    long, had no place to continue, or broke.
    """

    def __init__(
        self,
        module: str,
        settings: bytes,
        timeout_s: float,
        name: str,
        started: Callable[[bytes], None] = _fine,
        max_slow: int = MAX_SLOW,
        waits: bool = False,
    ) -> None:
        """`waits`: most slow jobs only wait for something, so a client with half of the slow ones begins no other."""
        self._module = module
        self._settings = settings
        self.timeout_s = timeout_s
        self._name = name
        self._started = started
        self._max_slow, self._waits = max_slow, waits
        self._resting: set[str] = set()  # clients
        self.turns: ClientTurns[asyncio.Future[None]] = ClientTurns(MAX_CHILDREN, MAX_WAITING)
        self.slow: list[_Job] = []
        self.idle: list[JobChild] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_killed = 0

    async def ask(self, line: bytes) -> bytes:
        """Returns the answer's line. Raises TookTooLong, Broke, or NoRoom when no child was free in time."""
        client = current_client.get()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._place(client)
        except TimeoutError:
            raise NoRoom(f"no {self._name} could be checked for {self.timeout_s:g} s; try again") from None
        job = _Job(client, line)
        self._spawn(self._run(job))
        try:
            return await asyncio.shield(job.answer)
        finally:
            job.is_wanted = False
            if job in self.slow:
                job.fail(NoRoom(f"nobody waits for this {self._name}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self.idle:
            await self.idle.pop().kill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- places

    async def _place(self, client: str) -> None:
        """Waits for the client's turn. Raises NoRoom if too many of its jobs wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.turns.join(client, turn)
        self._give_places()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(client)
            else:
                self.turns.leave(client, turn)
            raise

    def _leave(self, client: str) -> None:
        self.turns.ended(client)
        self._give_places()

    def _give_places(self) -> None:
        while (found := self.turns.next(self._may_begin)) is not None:
            client, turn = found
            if turn.done():  # its caller is leaving at this moment
                self.turns.ended(client)
            else:
                turn.set_result(None)

    def _may_begin(self, client: str) -> bool:
        if client in self._resting:
            return False
        return not self._waits or 2 * sum(job.client == client for job in self.slow) < self._max_slow

    def _rests(self, client: str, for_s: float) -> None:
        def goes_on() -> None:
            self._resting.discard(client)
            self._give_places()

        self._resting.add(client)
        asyncio.get_running_loop().call_later(for_s, goes_on)

    # ---- a job

    async def _run(self, job: _Job) -> None:
        """Runs a job that has a place, whatever becomes of its caller."""
        try:
            answer = await self._try(job)
        except asyncio.CancelledError:
            job.fail(NoRoom(f"no {self._name} is checked any more"))
            raise
        except Exception as error:
            job.fail(error)
        else:
            if not job.answer.done():
                job.answer.set_result(answer)
        finally:
            self._gives_place_up(job)

    def _gives_place_up(self, job: _Job) -> None:
        if job.has_place:
            job.has_place = False
            self._leave(job.client)

    async def _try(self, job: _Job) -> bytes:
        """Runs a job. An idle child may have broken earlier: then a new one repeats the job."""
        # The last idle one is for a client without slow jobs: starting one takes long.
        is_others = len(self.idle) == 1 and any(each.client == job.client for each in self.slow)
        child = self.idle.pop() if self.idle and not is_others else None
        if child is not None:
            with contextlib.suppress(ConnectionError, EOFError):
                return await self._ask(child, job)
        child = await self._start()
        try:
            return await self._ask(child, job)
        except (ConnectionError, EOFError):
            raise Broke(f"the process that checks a {self._name} ended") from None

    async def _ask(self, child: JobChild, job: _Job) -> bytes:
        """Runs a job; the child is idle or dead afterwards. Raises EOFError or ConnectionError when it broke."""
        answer = b""
        task = asyncio.ensure_future(child.exchange(job.line))
        try:
            done, _ = await asyncio.wait({task}, timeout=min(QUICK_S, self.timeout_s))
            answer = task.result() if done else await self._go_on(task, child, job)
        finally:
            task.cancel()
            if not answer:
                self.num_killed += 1
            await (self._keep(child) if answer else child.kill())
        return answer

    async def _go_on(self, task: asyncio.Future[bytes], child: JobChild, job: _Job) -> bytes:
        """Waits until the deadline in a place for slow jobs. Raises TookTooLong, NoRoom."""
        left_s = self.timeout_s - QUICK_S
        if left_s > 0.0:
            if not job.is_wanted or not self._may_be_slow(job.client):
                self._rests(job.client, 2 * (time.monotonic() - job.begun_s))
                raise NoRoom(f"{len(self.slow)} slow {self._name}s are being checked; try again")
            self.slow.append(job)
            child.be_nice(SLOW_NICE)
            self._gives_place_up(job)
            self._spawn(self._restock())
            try:
                await asyncio.wait({task, job.answer}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.slow.remove(job)
                self._give_places()
        if task.done():
            return task.result()
        if job.answer.done():
            raise NoRoom(f"this {self._name} is not wanted any more")
        raise TookTooLong(f"not ready after {self.timeout_s:g} s")

    def _may_be_slow(self, client: str) -> bool:
        """Whether there is a place for a slow job, which another client may have to give up."""
        going_on = [job for job in self.slow if not job.answer.done()]
        if len(going_on) < self._max_slow:
            return True
        num_of = Counter(job.client for job in going_on)
        most = max(num_of, key=lambda each: num_of[each])
        if num_of[most] < num_of[client] + 2:
            return False
        latest = next(job for job in reversed(going_on) if job.client == most)
        latest.fail(NoRoom(f"slow {self._name}s of others came; send fewer at a time, or try again"))
        return True

    # ---- processes

    async def _restock(self) -> None:
        """Starts a child for the next quick job in place of one that has become slow."""
        if not self.idle:
            with contextlib.suppress(PdClusterError, OSError):  # the next job starts one, and hears why it cannot
                await self._keep(await self._start())

    async def _keep(self, child: JobChild) -> None:
        """Keeps a child for a later job, unless enough are idle."""
        if len(self.idle) < MAX_CHILDREN and child.is_quick():
            self.idle.append(child)
        else:
            await child.kill()

    async def _start(self) -> JobChild:
        """Starts a child that is ready for jobs."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_NBYTES)
            descriptor = theirs.fileno()
            arguments = (sys.executable, "-m", self._module, str(descriptor))
            try:
                process = await asyncio.create_subprocess_exec(
                    *arguments, pass_fds=[descriptor], stdin=asyncio.subprocess.DEVNULL
                )
            except BaseException:
                writer.close()
                raise
        child = JobChild(process, reader, writer)
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


class _Job:
    """`answer`: for its caller, who may have left (`is_wanted`). `has_place`: among the quick ones."""

    def __init__(self, client: str, line: bytes) -> None:
        self.client, self.line = client, line
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.is_wanted = self.has_place = True
        self.begun_s = time.monotonic()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may be left to hear of it


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

    def be_nice(self, nice: int) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        self._nice = nice

    def is_quick(self) -> bool:
        """Whether it has, or gets back, the priority for quick jobs, for which a process may lack the right."""
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
