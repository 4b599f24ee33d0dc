"""Starts one rank process of a worker, reads its reports, and ends it. Never imports torch.

If this process was given a preloader, the preloader forks the rank; without one, or if that fails, this process starts
the rank by a command line. Both kinds of rank behave the same, and the kernel kills them when this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping

import msgspec

from pd_cluster.devices.openmp_spinning import PARKED
from pd_cluster.engine.start.preloader import FORK_TIMEOUT_S, VARIABLE, Fork, NotForked, Preloader
from pd_cluster.process_messages import RankReport
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.settings.serve_options import without_keys

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
# Torch's stores look up the name of every address for their logs, and would wait for a name server that does not
# answer.
LOOKUPS = {"RES_OPTIONS": "timeout:1 attempts:1"}
# Prevents `import torch` from importing torch_npu, which fails without its driver.
DEFAULTS = {
    **LOOKUPS,
    **PARKED,  # ranks and the host's other processes often need the same cores
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would have nothing to do
}


def environment_of(config: WorkerConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    return environment(config.num_threads, {**inherited, **config.environment}, config.environment)


def environment(num_threads: int, inherited: Mapping[str, str], own: Mapping[str, str] = {}) -> dict[str, str]:
    """Makes the environment of a rank and of its preloader; an empty value in `own` removes a variable."""
    threads = str(num_threads)
    env = {**DEFAULTS, **without_keys(inherited), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return {name: value for name, value in env.items() if name != VARIABLE and own.get(name) != ""}


class RankProcess:
    def __init__(self, config: WorkerConfig, preloader: Preloader | None = None) -> None:
        self._config = config
        self._preloader = preloader
        self._process: _Spawned | _Forked | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def rank(self) -> int:
        return self._config.ranks.rank

    @property
    def pid(self) -> int:
        """The process's pid; 0 before it exists."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative: the signal that ended it. None while the process runs, or if the code is unknown."""
        return self._process.exit_code if self._process is not None else None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno(), *self._config.ranks.fds]
            env = environment_of(self._config, os.environ)
            self._process = await self._forked(env, files) or await _Spawned.start(env, files)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(msgspec.json.encode(self._config) + b"\n")
        with contextlib.suppress(ConnectionError):  # the process may have died at once; `wait` reports that
            await self._writer.drain()

    async def _forked(self, env: dict[str, str], files: list[int]) -> _Forked | None:
        """Asks the preloader for the process; returns None if it must be spawned."""
        if self._preloader is None:
            return None
        try:
            return await _Forked.start(self._preloader, env, files)
        except NotForked as error:
            log.warning("rank %d starts without the preloader: %s", self.rank, error)
            return None

    async def read_report(self) -> RankReport | None:
        """Returns the next report; None if the rank has ended, even in the middle of a line."""
        assert self._reader is not None
        try:
            line = await self._reader.readline()
            return msgspec.json.decode(line, type=RankReport) if line else None
        except (ConnectionError, msgspec.DecodeError):
            return None

    async def wait(self) -> None:
        """Waits until the process has ended; returns at once if it was never started."""
        if self._process is not None:
            await self._process.wait()

    def ask(self, what: str) -> None:
        if self._writer is not None and self.is_running:
            self._writer.write(f"{what}\n".encode())

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self._process.has_ended

    async def stop(self) -> None:
        """Asks the process to stop after its step; kills it if it does not."""
        if not self.is_running:
            return
        self.ask("stop")
        try:
            await asyncio.wait_for(self.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kills the process; does nothing if it was never started, or has ended."""
        if self._process is not None and self.is_running:
            self._process.kill()
            await self._process.wait()


class _Spawned:
    """A process started by command line, as a child of this one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, env: dict[str, str], files: list[int]) -> _Spawned:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pd_cluster.engine.start.rank_main", str(files[0])),
                pass_fds=files,
                stdin=asyncio.subprocess.DEVNULL,
                env=env,
            )
        )

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class _Forked:
    """A process that the preloader forked, and whose parent is the preloader."""

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self.pid = fork.pid

    @classmethod
    async def start(cls, preloader: Preloader, env: dict[str, str], files: list[int]) -> _Forked:
        """Asks for a fork. Raises NotForked."""
        fork = preloader.ask(env, files)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                while True:
                    await _readable(fork.fileno())
                    if fork.accept():
                        break
        except TimeoutError:
            preloader.is_silent = True  # so that the other ranks do not wait for it
            raise NotForked(f"the preloader did not answer within {FORK_TIMEOUT_S:g} s") from None
        finally:
            if not fork.pid:  # there is no fork, even if this call was cancelled
                fork.close()
        return cls(fork)

    @property
    def exit_code(self) -> int | None:
        return self._fork.exit_code

    @property
    def has_ended(self) -> bool:
        return self._fork.has_ended

    async def wait(self) -> None:
        if not self._fork.has_ended:
            await _readable(self._fork.fileno())
            self._fork.reap()

    def kill(self) -> None:
        self._fork.kill()


async def _readable(fd: int) -> None:
    """Waits until `fd` is readable; several tasks may wait for the same `fd`."""
    watched = os.dup(fd)
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
