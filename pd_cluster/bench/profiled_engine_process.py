"""Starts and ends an engine process that runs steps for `pd-cluster profile`, and reads its answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster import host
from pd_cluster.bench.profile_messages import EngineReady, Steps, TimedStep
from pd_cluster.cluster.processes.rank_process import environment_of
from pd_cluster.devices.device import num_threads_for
from pd_cluster.engine.start.preloader import has_no_driver
from pd_cluster.errors import ConfigError, PdClusterError
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.log_setup import Logs
from pd_cluster.settings.process_configs import Credentials, SharedCores, WorkerConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Role

MODULE = "pd_cluster.bench.profiled_engine_child"
MOST_LINE_NBYTES = 64 << 20
END_S = 5.0
SPARE_S = 600.0  # the wait for an answer beyond the steps' own time, because the first step may compile
NUM_LOG_LINES = 15


class ProfiledEngine:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log
        self.ready = EngineReady()

    async def begin(self, config: WorkerConfig) -> None:
        """Waits until the model is loaded. Raises ConfigError if that fails."""
        self.ready = await self._ask(config, EngineReady, SPARE_S)
        if self.ready.error:
            raise ConfigError(self.ready.error)

    async def run(self, steps: Steps) -> list[TimedStep]:
        """Raises PdClusterError with the last lines of the engine's log if it has ended."""
        timed: list[TimedStep] = await self._ask(steps, list[TimedStep], steps.seconds + SPARE_S)
        return timed

    async def _ask(self, what: msgspec.Struct, kind: Any, timeout_s: float) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                process.stdin.write(msgspec.json.encode(what) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
            raise PdClusterError("\n".join(["an engine process has ended or hangs; its last lines:", *last]))
        return msgspec.json.decode(line, type=kind)

    async def end(self) -> None:
        """Ends the process by closing its input or, if that does not help, by force."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(process.wait(), END_S)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def started(engine: EngineConfig, roles: tuple[Role, ...], folder: Path) -> AsyncIterator[list[ProfiledEngine]]:
    """Yields engines that share this host's cores like instances of one rank table; ends them afterwards."""
    async with contextlib.AsyncExitStack() as ending:
        engines, configs = [], [_config(engine, role, at, len(roles), folder) for at, role in enumerate(roles)]
        for config in configs:
            log = folder / f"{config.name}.log"
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", MODULE),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=output,
                    limit=MOST_LINE_NBYTES,
                    env=environment_of(config, os.environ),
                    start_new_session=True,  # Ctrl-C reaches only this process, which then ends them
                )
            engines.append(ProfiledEngine(process, log))
            ending.push_async_callback(engines[-1].end)
        await asyncio.gather(*(each.begin(config) for each, config in zip(engines, configs, strict=True)))
        yield engines


def _config(engine: EngineConfig, role: Role, index: int, num: int, folder: Path) -> WorkerConfig:
    given = int(os.environ.get("OMP_NUM_THREADS", 0))
    may_share = num > 1 and not given and has_no_driver(engine.device)
    num_cores = len(host.cores())
    cores = None
    if may_share and num_cores > 1 and host.cores_quota() >= num_cores:  # the same condition as in `pd-cluster serve`
        cores = SharedCores(
            ledger=str(folder / "cores"),
            first=index,
            num_ranks=num,
            num_cores=host.num_cores(),
            lending="auto",
            binding="auto",
        )
    return WorkerConfig(
        name=f"{role}-{index}",
        role=role,
        server_ip="127.0.0.1",
        bind_address="127.0.0.1",
        device_ids=[str(index)],
        epoch=index + 1,
        credentials=Credentials(b""),
        num_threads=given or num_threads_for(num),
        cores=cores,
        engine=msgspec.structs.replace(engine, num_local_ranks=num),
        timeouts=Timeouts(),
        logs=Logs(level="WARNING"),
    )
