"""Runs jobs that may never end, or take all memory, in child processes that have a deadline.

A child is started as `python -m MODULE FD`, where FD is one end of a socket pair. The child reads its settings, then
one job per line; it writes a line when it is ready, and a line per job, which may announce bytes that follow. Children
are started on demand, reused, and killed when a job takes too long. Clients take turns (fair_slots.py). Knows nothing
of the jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from pd_cluster.errors import NoCapacity, PdClusterError, Unavailable
from pd_cluster.service.concurrency.fair_slots import FairSlots, current_client
from pd_cluster.service.concurrency.job_child import MAX_LINE_NBYTES, JobChild

log = logging.getLogger(__name__)

Places = FairSlots[asyncio.Future[None]]

MAX_CHILDREN = 3  # the most children with quick jobs
MAX_SLOW = 4  # the most children with slow jobs
MAX_WAITING = 64
QUICK_S = 0.5
SLOW_NICE = 12  # the niceness of a process with a slow job
START_TIMEOUT_S = 60.0  # the time for imports, and for reading a tokenizer


def _accept(line: bytes) -> None:
    """Accepts a new child."""


class ChildTimeout(PdClusterError):
    """The child was killed because it exceeded its deadline."""


class ChildCrashed(PdClusterError):
    """A new child ended during the job."""


class SlowJobs(NamedTuple):
    """The number of slow jobs that may run in addition to quick ones.

    `wait`: slow jobs mostly wait for other systems. In this case, a client that holds half of the slow places may start
    no further job.
    """

    most: int
    wait: bool


COMPUTING = SlowJobs(MAX_SLOW, wait=False)


class ChildPool:
    """`name`: the thing that the jobs check, for messages. `started` checks a new child's first line, and may raise.

    Most jobs are quick. A job that takes longer than QUICK_S gives up its place, so that quick jobs do not wait for it,
    and continues in a place for `slow` jobs. For both kinds of places, clients take turns. If no slow place is
    available for its client, the job is stopped, and starts again when such a place is free. Until twice the lost time
    has passed, the client may start no other job. A slow job ends when its caller leaves.

    `num_killed` counts children that were killed because they took too long, had no place to continue, or failed.
    """

    def __init__(
        self,
        module: str,
        settings: bytes,
        timeout_s: float,
        name: str,
        started: Callable[[bytes], None] = _accept,
        slow: SlowJobs = COMPUTING,
    ) -> None:
        self._module = module
        self._settings = settings
        self.timeout_s = timeout_s
        self._name = name
        self._started = started
        self._slow_jobs = slow
        self._resting: set[str] = set()  # clients that may start no job now
        self.turns: Places = FairSlots(MAX_CHILDREN, MAX_WAITING)
        self.slow_turns: Places = FairSlots(slow.most, MAX_WAITING)
        self.slow: list[_Job] = []
        self.idle: list[JobChild] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_killed = 0

    async def ask(self, line: bytes) -> bytes:
        """Runs a job and returns its answer. Raises ChildTimeout, ChildCrashed, or NoCapacity without a free child."""
        client = current_client.get()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._place(client)
        except TimeoutError:
            raise self._no_place() from None
        job = _Job(client, line)
        self._spawn(self._run(job))
        try:
            return await asyncio.shield(job.answer)
        finally:
            job.is_wanted = False
            if not job.has_place:
                job.fail(NoCapacity(f"the request for this {self._name} was cancelled"))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        while self.idle:
            await self.idle.pop().kill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # ---- places

    async def _place(self, client: str) -> None:
        """Waits for the client's turn. Raises NoCapacity if too many of its jobs wait."""
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
        _give(self.turns, self._may_begin)

    def _no_place(self) -> NoCapacity:
        return NoCapacity(f"this {self._name} has waited {self.timeout_s:g} s for its check; try again")

    def _may_begin(self, client: str) -> bool:
        if client in self._resting:
            return False
        return not self._slow_jobs.wait or 2 * sum(job.client == client for job in self.slow) < self._slow_jobs.most

    def _rests(self, client: str, for_s: float) -> None:
        def goes_on() -> None:
            self._resting.discard(client)
            self._give_places()

        self._resting.add(client)
        asyncio.get_running_loop().call_later(for_s, goes_on)

    # ---- a job

    async def _run(self, job: _Job) -> None:
        """Runs a job that has a place, even if its caller leaves."""
        try:
            answer = await self._try(job)
        except asyncio.CancelledError:
            job.fail(NoCapacity(f"this server has stopped checking {self._name}s"))
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
        try:
            return await self._quickly(job)
        except _NoSlowPlace:
            self._rests(job.client, 2 * (time.monotonic() - job.begun_s))
            self._gives_place_up(job)
        if not job.is_wanted:
            raise NoCapacity(f"the request for this {self._name} was cancelled")
        return await self._later(job)

    async def _quickly(self, job: _Job) -> bytes:
        """Runs a job. If an idle child turns out to have failed, a new child repeats the job. Raises _NoSlowPlace."""
        # The last idle child is reserved for clients without slow jobs, because starting another child takes long.
        is_others = len(self.idle) == 1 and any(each.client == job.client for each in self.slow)
        child = self.idle.pop() if self.idle and not is_others else None
        if child is not None:
            with contextlib.suppress(ConnectionError, EOFError):
                return await self._ask(child, job)
        child = await self._start()
        try:
            return await self._ask(child, job)
        except (ConnectionError, EOFError):
            raise self._broke() from None

    async def _later(self, job: _Job) -> bytes:
        """Restarts a job in a place for slow jobs, as soon as its client gets one."""
        turn = self._slow_turn(job.client)
        try:
            awaited: set[asyncio.Future[Any]] = {turn, job.answer}
            await asyncio.wait(awaited, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if job.answer.done() or not turn.done():
                raise self._no_place()
            child = await self._start()
            task = asyncio.ensure_future(child.exchange(job.line))
            async with self._kept_or_killed(child, task):
                return await self._slowly(task, child, job, self.timeout_s)
        except (ConnectionError, EOFError):
            raise self._broke() from None
        finally:
            self._end_slow_turn(job.client, turn)

    async def _ask(self, child: JobChild, job: _Job) -> bytes:
        """Runs a job in the child, which is then idle or dead.

        Raises EOFError or ConnectionError if the child failed.
        """
        task = asyncio.ensure_future(child.exchange(job.line))
        async with self._kept_or_killed(child, task):
            done, _ = await asyncio.wait({task}, timeout=min(QUICK_S, self.timeout_s))
            return task.result() if done else await self._go_on(task, child, job)

    @contextlib.asynccontextmanager
    async def _kept_or_killed(self, child: JobChild, task: asyncio.Future[bytes]) -> AsyncIterator[None]:
        """Keeps a child whose job has ended; kills any other child."""
        try:
            yield
        finally:
            is_fine = task.done() and not task.cancelled() and task.exception() is None
            task.cancel()
            self.num_killed += not is_fine
            await (self._keep(child) if is_fine else child.kill())

    async def _go_on(self, task: asyncio.Future[bytes], child: JobChild, job: _Job) -> bytes:
        """Waits until the deadline in a place for slow jobs. Raises ChildTimeout, NoCapacity, _NoSlowPlace."""
        left_s = self.timeout_s - QUICK_S
        if left_s <= 0.0:
            raise self._too_long()
        if not job.is_wanted:
            self._rests(job.client, 2 * (time.monotonic() - job.begun_s))
            raise NoCapacity(f"the request for this {self._name} was cancelled")
        turn = self._slow_turn(job.client)
        try:
            if not turn.done():
                raise _NoSlowPlace
            self._gives_place_up(job)
            self._spawn(self._restock())
            return await self._slowly(task, child, job, left_s)
        finally:
            self._end_slow_turn(job.client, turn)

    async def _slowly(self, task: asyncio.Future[bytes], child: JobChild, job: _Job, left_s: float) -> bytes:
        """Waits for a job that has a place for slow jobs. Raises ChildTimeout, NoCapacity."""
        child.be_nice(SLOW_NICE)
        self.slow.append(job)
        try:
            await asyncio.wait({task, job.answer}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.slow.remove(job)
        if task.done():
            return task.result()
        if job.answer.done():
            raise NoCapacity(f"the request for this {self._name} was cancelled")
        raise self._too_long()

    def _slow_turn(self, client: str) -> asyncio.Future[None]:
        """Returns a future that is done once the client has a place for a slow job. Raises NoCapacity."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.slow_turns.join(client, turn)
        _give(self.slow_turns)
        return turn

    def _end_slow_turn(self, client: str, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self.slow_turns.ended(client)
        else:
            self.slow_turns.leave(client, turn)
        _give(self.slow_turns)
        self._give_places()  # the end of a slow job may let its client begin another

    def _too_long(self) -> ChildTimeout:
        return ChildTimeout(f"not ready after {self.timeout_s:g} s")

    def _broke(self) -> ChildCrashed:
        return ChildCrashed(f"the process that checks a {self._name} ended")

    # ---- processes

    async def _restock(self) -> None:
        """Starts a child for the next quick job in place of a child whose job is slow."""
        if not self.idle:
            with contextlib.suppress(PdClusterError, OSError):  # the next job tries again, and reports the error
                await self._keep(await self._start())

    async def _keep(self, child: JobChild) -> None:
        """Keeps a child for a later job, unless enough children are idle."""
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
            raise Unavailable(f"no {self._name} can be checked right now; the server's log has the details") from None
        finally:
            if not is_ready:
                await child.kill()
        return child


def _give(places: Places, may: Callable[[str], bool] = lambda client: True) -> None:
    """Gives each free place to the next client."""
    while (found := places.next(may)) is not None:
        client, turn = found
        if turn.done():  # its caller has just been cancelled
            places.ended(client)
        else:
            turn.set_result(None)


class _NoSlowPlace(Exception):
    """A job is slow, and no place for slow jobs is available for its client now."""


class _Job:
    """`answer`: the caller's result. `is_wanted`: the caller has not left. `has_place`: the job has a place for quick
    jobs.
    """

    def __init__(self, client: str, line: bytes) -> None:
        self.client, self.line = client, line
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.is_wanted = self.has_place = True
        self.begun_s = time.monotonic()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # marks the error as retrieved, since the caller may have left
