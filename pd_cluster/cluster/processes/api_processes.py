"""Starts, updates, restarts and stops the scheduler's API processes, and reads their reports. Never imports torch.

Each API process serves the public port on its own socket (SO_REUSEPORT), routes independently and has its own
connections to the workers. This process queries the workers, decides which are in service, and adds up the API
processes' outstanding work. The messages are in process_messages.py, their order in docs/protocol/membership.md. Knows
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.records.request_stats import RequestStats, added
from pd_cluster.errors import InstanceLost
from pd_cluster.process_messages import (
    AdapterNames,
    AdapterUse,
    AllStats,
    ApiReport,
    Busy,
    Gate,
    Instances,
    InstanceView,
    Keys,
    MoveOn,
    OthersBusy,
    OthersTokens,
    Outstanding,
    PauseUpdate,
    Stats,
    Stop,
    ToApi,
)
from pd_cluster.settings.process_configs import ApiProcessConfig

log = logging.getLogger(__name__)

PUBLISH_S = 0.05  # the minimum time between two updates
SHARE_S = 0.1
SHARE_BUSY_S = 0.01  # the interval between updates of the current work
MAX_LINE_NBYTES = 16 << 20
MAX_DEATHS, DEATHS_S = 5, 30.0  # this many deaths of one process within this time end the scheduler
SILENCE_S = 30.0  # a process may be silent this long while it starts; otherwise it reports every second
END_TIMEOUT_S = 10.0  # longer than an idle or hurried process needs to end
NOTHING = Outstanding(0, 0)


@dataclass(slots=True)
class _Api:
    """One API process; `report` is its last report, `sent_list` the last list of instances sent to it."""

    config: ApiProcessConfig
    listener: socket.socket
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None
    report: dict[str, Outstanding] = field(default_factory=dict)
    busy: Busy = field(default_factory=Busy)
    stats: Stats = field(default_factory=Stats)  # counters of this life
    sent_stats: AllStats | None = None
    adapters: AdapterUse = field(default_factory=AdapterUse)
    adapters_version: int = 0
    pause_version: int = 0
    is_idle: bool = False  # it is draining and has no requests left, or it has ended
    sent_list: bytes = b""
    deaths_s: list[float] = field(default_factory=list)

    def tell(self, what: ToApi) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(msgspec.json.encode(what) + b"\n")

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class ApiProcesses:
    """Writes the processes' outstanding work into `instances`. `listeners` are the processes' sockets, in order."""

    def __init__(
        self,
        configs: Sequence[ApiProcessConfig],
        listeners: Sequence[socket.socket],
        instances: list[Instance],
        drain_timeout_s: float,
        own: RequestStats | None = None,
    ) -> None:
        """`own`: the counters of this process, which serves no requests."""
        self.apis = [_Api(config, listener) for config, listener in zip(configs, listeners, strict=True)]
        self._busy_changed = asyncio.Event()
        self._reports_changed = False
        self._ended_stats = Stats()  # counters of ended processes
        self._own = RequestStats() if own is None else own
        self._instances = instances
        self._drain_timeout_s = drain_timeout_s
        self._is_stopping = False
        self._all_idle = asyncio.Event()
        self._reported = asyncio.Event()
        self._num_adapter_news = self._num_steers = 0

    async def run(self, change: Callable[[], Awaitable[None]]) -> None:
        """Runs until cancelled; `change` returns when an instance may have changed. Raises InstanceLost."""
        async with asyncio.TaskGroup() as group:
            for api in self.apis:
                group.create_task(self._keep(api))
            group.create_task(self._share_reports())
            group.create_task(self._share_busy())
            while True:
                # begins to wait before the update is sent, so that no change is missed
                changed = asyncio.ensure_future(change())
                try:
                    self.publish()
                    await asyncio.sleep(PUBLISH_S)
                    await changed
                finally:
                    changed.cancel()

    def publish(self) -> None:
        """Sends the list of instances to every process that has not received its current state."""
        news = Instances([view_of(instance) for instance in self._instances])
        encoded = msgspec.json.encode(news)
        for api in self.apis:
            if encoded != api.sent_list and api.writer is not None:
                api.sent_list = encoded
                api.tell(news)

    def move_on(self, instance: Instance, why: str) -> None:
        """Moves an instance's requests elsewhere, in all processes."""
        self.publish()  # first tells the processes that the instance takes no more requests
        for api in self.apis:
            api.tell(MoveOn(instance.name, why))

    def set_keys(self, keys: Keys) -> None:
        """Sets the keys in every process, including those started later."""
        for api in self.apis:
            api.config = msgspec.structs.replace(api.config, keys=keys)
            api.tell(keys)

    async def publish_adapters(self, names: dict[str, str]) -> None:
        """Sets the adapters' names in every process; returns when all live processes have them."""
        self._num_adapter_news += 1
        news = AdapterNames(dict(names), self._num_adapter_news)
        for api in self.apis:
            api.config = msgspec.structs.replace(api.config, adapters=news)
            api.tell(news)
        await self._until_confirmed("the adapters", lambda api: api.adapters_version >= news.version)

    async def control_requests(self, gate: Gate, aborts: Collection[str] | None = None, keeps: bool = False) -> None:
        """Implements `ServingProcesses.control_requests` (members/cluster_control.py)."""
        self._num_steers += 1
        news = PauseUpdate(gate, self._num_steers, None if aborts is None else list(aborts), keeps)
        for api in self.apis:
            api.config = msgspec.structs.replace(api.config, pause=PauseUpdate(gate, news.version))
            api.tell(news)
        await self._until_confirmed("an operator's command", lambda api: api.pause_version >= news.version)

    async def until_idle(self) -> None:
        """Waits until no process reports a request at an instance."""
        while any(api.is_alive and api.busy.num_streams for api in self.apis):
            await self._reported.wait()

    async def _until_confirmed(self, what: str, has_confirmed: Callable[[_Api], bool]) -> None:
        """Waits until all live processes have confirmed a change. `what`: its name, for the log."""
        try:
            async with asyncio.timeout(SILENCE_S):  # a process that is silent this long is killed
                while any(api.is_alive and not has_confirmed(api) for api in self.apis):
                    await self._reported.wait()
        except TimeoutError:
            log.error("not all API processes have confirmed %s within %g s", what, SILENCE_S)

    @property
    def stats(self) -> Stats:
        """The counters of all processes, including ended ones."""
        return added([self._own.snapshot(), self._ended_stats, *(api.stats for api in self.apis)])

    @property
    def busy(self) -> Busy:
        """The current work of all processes, as last reported."""
        return _sum_of([api.busy for api in self.apis])

    def adapters_in_use(self) -> set[str]:
        """The digests of the adapters that running requests use."""
        return {digest for api in self.apis for digest in api.adapters.running + api.adapters.waiting}

    # ---- the end

    def drain(self) -> None:
        """Lets current requests finish, and refuses new ones; every process stays until all are idle."""
        self._is_stopping = True
        for api in self.apis:
            api.tell(Stop())

    async def finish(self, hurry: asyncio.Event) -> None:
        """Waits until all processes have ended, and kills those that do not. `hurry`: makes them end sooner."""
        if not self._is_stopping:  # the scheduler has failed
            self.drain()
        ended = asyncio.ensure_future(self._ended())
        hurried, idle = asyncio.ensure_future(hurry.wait()), asyncio.ensure_future(self._all_idle.wait())
        try:
            timeout_s = self._drain_timeout_s + END_TIMEOUT_S
            await asyncio.wait({ended, hurried, idle}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self.drain()
                await asyncio.wait({ended}, timeout=END_TIMEOUT_S)
            if not ended.done():
                for api in self.apis:
                    api.kill()
                await asyncio.wait({ended}, timeout=END_TIMEOUT_S)
        finally:
            for task in (ended, hurried, idle):
                task.cancel()

    async def _ended(self) -> None:
        await asyncio.gather(*(api.process.wait() for api in self.apis if api.process is not None))

    # ---- one process

    async def _keep(self, api: _Api) -> None:
        """Starts the process, reads its reports, and restarts it after its end."""
        while not self._is_stopping:
            process, reader = await self._start(api)
            await self._listen(api, reader)
            if api.writer is not None:
                api.writer.close()  # a process that is still alive ends when it reads the end of file
            try:
                code = await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
            except TimeoutError:
                api.kill()
                code = await process.wait()
            self.remove_work(api)
            if not self._is_stopping:
                self._note_death(api, process.pid, code)
        api.listener.close()  # new connections go to the remaining processes

    async def _listen(self, api: _Api, reader: asyncio.StreamReader) -> None:
        """Reads reports until the process ends, falls silent, or sends something invalid."""
        try:
            while line := await asyncio.wait_for(reader.readline(), SILENCE_S):
                self.add_report(api, msgspec.json.decode(line, type=ApiReport))
        except TimeoutError:
            log.error("API process %d has not reported for %g s", api.config.index, SILENCE_S)
            api.kill()
        except (ConnectionError, msgspec.DecodeError, ValueError) as error:
            log.error("API process %d: %s", api.config.index, error)

    def _note_death(self, api: _Api, pid: int, code: int) -> None:
        now_s = time.monotonic()
        api.deaths_s = [at_s for at_s in api.deaths_s if now_s - at_s < DEATHS_S] + [now_s]
        log.error("API process %d (pid %d) ended with code %d; restarting it", api.config.index, pid, code)
        if len(api.deaths_s) >= MAX_DEATHS:
            raise InstanceLost(f"API process {api.config.index} ended {MAX_DEATHS} times within {DEATHS_S:g} s")

    async def _start(self, api: _Api) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        if api.writer is not None:  # the writer of the ended process
            api.writer.close()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pd_cluster.api.api_process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno(), *_descriptors(api.config)],
                stdin=asyncio.subprocess.DEVNULL,
            )
            undo.pop_all()
        api.process = process
        reader, api.writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_NBYTES)
        api.writer.write(msgspec.json.encode(api.config) + b"\n")
        api.sent_list, api.sent_stats = b"", None
        self.share_stats()  # before a client can ask it for the totals
        self.publish()
        if self._is_stopping:  # draining began while this process started
            api.tell(Stop())
        return process, reader

    def add_report(self, api: _Api, report: ApiReport) -> None:
        """Adds a report to the sums."""
        if api.busy != report.busy:
            self._busy_changed.set()
        api.report, api.is_idle, api.busy = report.outstanding, report.is_idle, report.busy
        api.adapters, api.adapters_version = report.adapters, report.adapters_version
        api.pause_version = report.pause_version
        self._reported.set()
        self._reported = asyncio.Event()
        if report.stats is not None:
            api.stats = report.stats
        if all(each.is_idle for each in self.apis):
            self._all_idle.set()
        self._reports_changed = True
        for instance in self._instances:
            each = [other.report.get(instance.name, NOTHING) for other in self.apis]
            instance.num_outstanding = sum(part.num_legs for part in each)
            instance.outstanding_tokens = sum(part.num_tokens for part in each)

    def remove_work(self, api: _Api) -> None:
        """Removes the process's outstanding work; its counters stay in the totals."""
        self.add_report(api, ApiReport({}, is_idle=self._is_stopping))
        self._ended_stats, api.stats = added([self._ended_stats, api.stats]), Stats()

    async def _share_reports(self) -> None:
        while True:
            await asyncio.sleep(SHARE_S)
            if self._reports_changed:
                self.share_reports()
                self.share_stats()

    def share_reports(self) -> None:
        """Sends each process the others' outstanding work."""
        self._reports_changed = False
        for api in self.apis:
            tokens = {i.name: i.outstanding_tokens - _tokens(api, i.name) for i in self._instances}
            api.tell(OthersTokens(tokens))

    async def _share_busy(self) -> None:
        """Sends each process the others' current load shortly after it changes."""
        while True:
            await self._busy_changed.wait()
            self._busy_changed.clear()
            for api in self.apis:
                busy = self._busy_of_others(api)
                if api.sent_stats is not None and api.sent_stats.others != busy:
                    api.sent_stats = msgspec.structs.replace(api.sent_stats, others=busy)
                    api.tell(OthersBusy(busy))
            await asyncio.sleep(SHARE_BUSY_S)

    def _busy_of_others(self, api: _Api) -> Busy:
        return _sum_of([each.busy for each in self.apis if each is not api])

    def share_stats(self) -> None:
        """Sends each process the totals, and the others' current load, if these changed."""
        stats = self.stats
        num_alive = sum(api.is_alive for api in self.apis)
        for api in self.apis:
            busy = self._busy_of_others(api)
            use = [each.adapters for each in self.apis if each is not api]
            news = AllStats(stats, busy, num_alive, _together(use))
            if news != api.sent_stats:
                api.sent_stats = news
                api.tell(news)


def _sum_of(parts: Sequence[Busy]) -> Busy:
    return Busy(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


def _together(uses: Sequence[AdapterUse]) -> AdapterUse:
    running = {digest for use in uses for digest in use.running}
    waiting = {digest for use in uses for digest in use.waiting}
    return AdapterUse(sorted(running), sorted(waiting))


def _descriptors(config: ApiProcessConfig) -> list[int]:
    return [fd for fd in (config.listener_fd, config.admin_fd, config.rates_fd) if fd >= 0]


def _tokens(api: _Api, name: str) -> int:
    return api.report.get(name, NOTHING).num_tokens


def view_of(instance: Instance) -> InstanceView:
    return InstanceView(
        name=instance.name,
        role=instance.role,
        host=instance.host,
        port=instance.port,
        device_ids=instance.device_ids,
        state=instance.state,
        reason=instance.reason,
        service=instance.service,
        next_role=instance.next_role,
        info=instance.info,
    )
