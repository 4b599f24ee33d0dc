"""Starts a worker's rank process, listens to what it reports, ends it. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec

from pd_cluster.config import WorkerConfig
from pd_cluster.errors import ConfigError, InstanceLost
from pd_cluster.reports import InstanceInfo, RankReport

STOP_TIMEOUT_S = 5.0


class RankProcess:
    """`info` is what `/instance` answers. One rank process a device; tensor parallelism will start more."""

    def __init__(self, config: WorkerConfig, cluster_tag: str) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.info = InstanceInfo(
            name=config.name,
            role=config.role,
            state="loading",
            server_ip=config.server_ip,
            device_ids=config.device_ids,
            epoch=config.epoch,
            pid=os.getpid(),
            tp_size=config.engine.tensor_parallel_size,
            table_digest=cluster_tag,
        )

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        threads = str(self._config.num_threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pd_cluster.engine.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=env,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(msgspec.json.encode(self._config) + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once: `watch` says so
            await self._writer.drain()

    async def watch(self) -> None:
        """Follows the rank until it ends. Raises ConfigError with its own words, or InstanceLost with its exit code."""
        assert self._process is not None
        failure = ""
        while (report := await self._read_report()) is not None:
            failure = report.error
            known = {name: getattr(report, name) for name in RankReport.__struct_fields__}
            self.info = msgspec.structs.replace(self.info, **known)
        code = await self._process.wait()
        self.info = msgspec.structs.replace(self.info, state="failed", error=failure or f"exit code {code}")
        if failure:
            raise ConfigError(failure)
        raise InstanceLost(f"{self._config.name}: its rank process (pid {self._process.pid}) ended with code {code}")

    async def _read_report(self) -> RankReport | None:
        """None when the rank has ended, also in the middle of a line."""
        assert self._reader is not None
        try:
            line = await self._reader.readline()
            return msgspec.json.decode(line, type=RankReport) if line else None
        except (ConnectionError, msgspec.DecodeError):
            return None

    async def stop(self) -> None:
        """Asks it to stop after its step; kills it when it does not."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ConnectionError):
            if self._writer is not None:
                self._writer.write(b"stop\n")
                await self._writer.drain()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
