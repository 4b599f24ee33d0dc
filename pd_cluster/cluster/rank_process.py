"""One rank process of a worker: starts it, listens to what it reports, ends it. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping

import msgspec

from pd_cluster.config import WorkerConfig
from pd_cluster.reports import RankReport

STOP_TIMEOUT_S = 5.0
# torch's stores look up the name of every address, for their logs, and wait for a name server that is silent.
LOOKUPS = {"RES_OPTIONS": "timeout:1 attempts:1"}
# Else `import torch` imports torch_npu, wherever it is installed, and fails where its driver is not.
DEFAULTS = {**LOOKUPS, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def environment_of(config: WorkerConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    threads = str(config.num_threads)
    taken_away = [name for name, value in config.environment.items() if not value]
    env = {**DEFAULTS, **inherited, **config.environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return {name: value for name, value in env.items() if name not in taken_away}


class RankProcess:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def rank(self) -> int:
        return self._config.ranks.rank

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pd_cluster.engine.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno(), *self._config.ranks.fds],
                stdin=asyncio.subprocess.DEVNULL,
                env=environment_of(self._config, os.environ),
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(msgspec.json.encode(self._config) + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once: `wait` says so
            await self._writer.drain()

    async def read_report(self) -> RankReport | None:
        """None when the rank has ended, also in the middle of a line."""
        assert self._reader is not None
        try:
            line = await self._reader.readline()
            return msgspec.json.decode(line, type=RankReport) if line else None
        except (ConnectionError, msgspec.DecodeError):
            return None

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def ask(self, what: str) -> None:
        if self._writer is not None and self.exit_code is None:
            self._writer.write(f"{what}\n".encode())

    async def stop(self) -> None:
        """Asks it to stop after its step; kills it when it does not."""
        if self._process is None or self._process.returncode is not None:
            return
        self.ask("stop")
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Also one that was never started, or has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
