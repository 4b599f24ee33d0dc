"""The scheduler's API processes: started, told who is in the cluster, heard, started again, ended. Never imports torch.

Each serves the public port on a socket of its own (SO_REUSEPORT), routes by itself and talks to the workers by itself.
This process asks the workers, decides who is in service, and adds up what the API processes have sent. What is said is
in reports.py. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pd_cluster.cluster.instance import Instance
from pd_cluster.config import ApiConfig
from pd_cluster.errors import InstanceLost
from pd_cluster.reports import ApiReport, Instances, InstanceView, MoveOn, OthersTokens, Outstanding, ToApi

log = logging.getLogger(__name__)

PUBLISH_S = 0.05  # at most so often
MAX_LINE_NBYTES = 16 << 20
MAX_DEATHS, DEATHS_S = 5, 30.0  # more deaths of one process within this time end the scheduler
KILL_AFTER_S = 10.0  # longer than its drain may take


@dataclass(slots=True)
class _Api:
    """One process; `report` is the last that it said."""

    config: ApiConfig
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None
    report: dict[str, Outstanding] = field(default_factory=dict)
    died_s: list[float] = field(default_factory=list)
    told: bytes = b""

    def tell(self, what: ToApi) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(msgspec.json.encode(what) + b"\n")


class ApiProcesses:
    """`instances` is read whenever `changed()` returns, and the legs that the processes report are written into it."""

    def __init__(self, configs: Sequence[ApiConfig], instances: Callable[[], list[Instance]]) -> None:
        self._apis = [_Api(config) for config in configs]
        self._instances = instances
        self._stopping = False

    async def run(self, changed: Callable[[], asyncio.Future[None]]) -> None:
        """Until cancelled. Raises InstanceLost when a process does not stay alive."""
        async with asyncio.TaskGroup() as group:
            for api in self._apis:
                group.create_task(self._keep(api))
            while True:
                await changed()
                self.publish()
                await asyncio.sleep(PUBLISH_S)

    def publish(self) -> None:
        """Tells every process what it does not know yet."""
        news = Instances([view_of(instance) for instance in self._instances()])
        encoded = msgspec.json.encode(news)
        for api in self._apis:
            if encoded != api.told and api.writer is not None:
                api.told = encoded
                api.tell(news)

    def move_on(self, instance: Instance, why: str) -> None:
        """What runs there goes on elsewhere, whichever process serves it."""
        for api in self._apis:
            api.tell(MoveOn(instance.name, why))

    async def stop(self, drain_timeout_s: float, hurry: asyncio.Event) -> None:
        """Lets them drain; a hurry is passed on. Nothing of them is left."""
        self._stopping = True
        running = [api.process for api in self._apis if api.process is not None and api.process.returncode is None]
        self._signal(running)
        ended = [asyncio.ensure_future(process.wait()) for process in running]
        hurried = asyncio.ensure_future(hurry.wait())
        if ended:
            waiting = asyncio.gather(*ended)
            await asyncio.wait(
                {waiting, hurried}, timeout=drain_timeout_s + KILL_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not waiting.done():
                self._signal(running)
                await asyncio.wait({waiting}, timeout=KILL_AFTER_S)
        hurried.cancel()
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()
        await asyncio.gather(*ended)

    def _signal(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)

    async def _keep(self, api: _Api) -> None:
        """Starts it, hears it, starts it again."""
        while not self._stopping:
            reader = await self._start(api)
            with contextlib.suppress(ConnectionError, msgspec.DecodeError, ValueError):
                while line := await reader.readline():
                    self._hear(api, msgspec.json.decode(line, type=ApiReport))
            assert api.process is not None
            code = await api.process.wait()
            self._hear(api, ApiReport({}))
            if self._stopping:
                return
            now_s = time.monotonic()
            api.died_s = [at_s for at_s in api.died_s if now_s - at_s < DEATHS_S] + [now_s]
            log.error("API process %d (pid %d) ended with code %d", api.config.index, api.process.pid, code)
            if len(api.died_s) >= MAX_DEATHS:
                raise InstanceLost(f"API process {api.config.index} ended {MAX_DEATHS} times within {DEATHS_S:g} s")

    async def _start(self, api: _Api) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            api.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pd_cluster.api.api_process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno(), api.config.listener_fd, api.config.admin_fd],
                stdin=asyncio.subprocess.DEVNULL,
            )
        reader, api.writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_NBYTES)
        api.writer.write(msgspec.json.encode(api.config) + b"\n")
        api.told = b""
        self.publish()
        return reader

    def _hear(self, api: _Api, report: ApiReport) -> None:
        api.report = report.outstanding
        for instance in self._instances():
            mine = [each.report.get(instance.name, NOTHING) for each in self._apis]
            instance.num_outstanding = sum(each.num_legs for each in mine)
            instance.outstanding_tokens = sum(each.num_tokens for each in mine)
        for other in self._apis:
            if other is not api:
                own = other.report
                tokens = {
                    i.name: i.outstanding_tokens - own.get(i.name, NOTHING).num_tokens for i in self._instances()
                }
                other.tell(OthersTokens(tokens))


NOTHING = Outstanding(0, 0)


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
