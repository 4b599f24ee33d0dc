"""Runs all rank processes of one worker: they start together, and all end when one ends. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.cluster.processes.rank_process import RankProcess
from pd_cluster.engine.start.preloader import Preloader
from pd_cluster.engine.start.rank_main import EXIT_OTHER_RANK_LOST
from pd_cluster.errors import ConfigError, InstanceLost, told
from pd_cluster.process_messages import InstanceInfo, RankReport
from pd_cluster.settings.process_configs import RankPlace, WorkerConfig

log = logging.getLogger(__name__)

INFO_OF_RANK = tuple(name for name in RankReport.__struct_fields__ if name in InstanceInfo.__struct_fields__)
ENDS_OF_OTHERS = (0, EXIT_OTHER_RANK_LOST)  # exit codes of a rank that ended because another rank ended
BLAME_S = 0.5  # ranks that end within this time of each other are assumed to have the same cause


class Ranks:
    """One rank process per device of the instance. `info` is the answer to `/instance`: rank 0's report."""

    def __init__(self, config: WorkerConfig, preloader: Preloader | None = None) -> None:
        self._config = config
        several = config.ranks.size > 1
        self._folder = Path(tempfile.mkdtemp(prefix="pd-cluster-ranks-")) if several else None  # mode 0700
        self._sockets = [socket.socketpair() for _ in range(config.ranks.size - 1)]  # rank 0's end comes first
        self._processes = [RankProcess(self._config_of(rank), preloader) for rank in range(config.ranks.size)]
        self._error = self._lost = ""
        self._ended: list[RankProcess] = []  # in the order in which they ended
        self._changed = asyncio.Event()  # replaced after each change
        self.info = InstanceInfo(
            name=config.name,
            role=config.role,
            state="loading",
            server_ip=config.server_ip,
            device_ids=config.device_ids,
            epoch=config.epoch,
            pid=os.getpid(),
            max_num_seqs=config.engine.max_num_seqs,
            tp_size=config.ranks.size,
            **_unit_of(config),
        )

    async def no_more(self, state: str, timeout_s: float) -> None:
        """Waits until `info.state` differs from `state`, but at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.info.state == state:
                    await self._changed.wait()

    def _tell(self, **changes: object) -> None:
        self.info = msgspec.structs.replace(self.info, **changes)
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Starts all ranks and watches them until one ends. Raises ConfigError with the rank's message, or
        InstanceLost. Returns only if the instance is in a unit, after all its members have drained.
        """
        await self._start()
        await self._watch()

    async def _start(self) -> None:
        for process in self._processes:
            await process.start()
            self._tell(rank_pids=[each.pid for each in self._processes if each.pid])
        for pair in self._sockets:  # each end stays open only in its own process
            for end in pair:
                end.close()

    async def _watch(self) -> None:
        watching = [asyncio.ensure_future(self._follow(process)) for process in self._processes]
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if len(watching) > 1:
                await asyncio.wait(watching, timeout=BLAME_S)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        first = self._first_to_blame()
        if (
            self._config.unit is not None and first.exit_code == 0 and not self._lost
        ):  # another member of the unit had to end, so all members drained
            log.info("%s ends with its unit", self._config.name)
            return
        which = "its rank process" if len(self._processes) == 1 else f"rank {first.rank} of {len(self._processes)}"
        code = first.exit_code if first.exit_code is not None else "unknown to the preloader"
        lost = f"{which} (pid {first.pid}) ended with code {code}"
        if first.rank == 0 or first.exit_code in ENDS_OF_OTHERS:  # a rank that has not ended yet may be the cause
            lost = self._lost or lost
        error = self._error or lost
        self._tell(state="failed", error=told(error))
        if self._error:
            raise ConfigError(self._error)
        raise InstanceLost(f"{self._config.name}: {lost}")

    def drain(self) -> None:
        """Makes rank 0 announce that it drains, then refuse new work, and end when its work is done."""
        self._processes[0].ask("drain")

    async def ended(self) -> None:
        """Waits until rank 0 has ended."""
        await self._processes[0].wait()

    @property
    def has_work(self) -> bool:
        """Whether rank 0 may have requests; False before it is ready."""
        return self.info.state not in ("loading", "forming")

    async def stop(self) -> None:
        """Stops rank 0 after its step, and then the other ranks."""
        await (self._processes[0].stop() if self.has_work else self._processes[0].kill())
        for process in self._processes[1:]:
            await process.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _follow(self, process: RankProcess) -> None:
        while (report := await process.read_report()) is not None:
            self._error, self._lost = self._error or report.error, self._lost or report.lost
            if process.rank == 0:
                info = {name: getattr(report, name) for name in INFO_OF_RANK}
                self._tell(**{**info, "error": told(report.error)})
        await process.wait()
        self._ended.append(process)

    def _first_to_blame(self) -> RankProcess:
        """Returns the first rank that ended for a reason of its own, not because another rank had ended."""
        return min(self._ended, key=lambda process: process.exit_code in ENDS_OF_OTHERS)

    def _config_of(self, rank: int) -> WorkerConfig:
        if rank == 0:
            fds = tuple(ours.fileno() for ours, _ in self._sockets)
        else:
            fds = (self._sockets[rank - 1][1].fileno(),)
        store = str(self._folder / "ranks") if self._folder is not None else ""
        place = RankPlace(rank=rank, size=self._config.ranks.size, store=store, fds=fds)
        return msgspec.structs.replace(self._config, ranks=place)


def _unit_of(config: WorkerConfig) -> dict[str, Any]:
    """Returns the fields of InstanceInfo that describe the instance's place in its unit."""
    unit = config.unit
    return {"unit": unit.name, "unit_rank": unit.rank, "unit_size": unit.size} if unit is not None else {}
