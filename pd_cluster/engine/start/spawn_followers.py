"""The follower processes of an engine without a worker. This process starts them, and they end with it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec

from pd_cluster.devices.openmp_spinning import PARKED
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.model.parallel.rank_group import Group, Rendezvous, join
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import Credentials, RankPlace, WorkerConfig
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts

END_TIMEOUT_S = 5.0


class Followers:
    """Use as `with Followers(config, num_threads) as followers:`. This process is rank 0 of `tensor_parallel_size`."""

    def __init__(self, engine: EngineConfig, num_threads: int, timeouts: Timeouts | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pd-cluster-ranks-"))  # mode 0700
        self._size = engine.tensor_parallel_size
        self._timeouts = timeouts or Timeouts()
        self._config = _config(engine, num_threads, self._timeouts)
        self._parents: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        try:
            for rank in range(1, self._size):
                self._start(rank)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def meet(self) -> Group:
        """Joins the group and returns it. Raises InstanceLost if a follower does not join."""
        return join(Rendezvous(self._store, 0, self._size, self._timeouts.collective_timeout_s))

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for end in self._parents:
            end.close()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _store(self) -> str:
        return str(self._folder / "ranks")

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        parent, child = socket.socketpair()
        self._parents.append(parent)
        self.channels.append(Channel(ours.detach(), to.FromFollower, self._timeouts.collective_timeout_s))
        place = RankPlace(rank=rank, size=self._size, store=self._store, fds=(theirs.fileno(),))
        threads = str(self._config.num_threads)
        with theirs, child:
            process = subprocess.Popen(
                [sys.executable, "-m", "pd_cluster.engine.start.rank_main", str(child.fileno())],
                pass_fds=[theirs.fileno(), child.fileno()],
                stdin=subprocess.DEVNULL,
                env={**PARKED, **os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
        self._processes.append(process)
        parent.sendall(msgspec.json.encode(msgspec.structs.replace(self._config, ranks=place)) + b"\n")


def _config(engine: EngineConfig, num_threads: int, timeouts: Timeouts) -> WorkerConfig:
    """Returns the configuration of a worker without peers."""
    return WorkerConfig(
        name="engine",
        role="decode",
        server_ip="127.0.0.1",
        bind_address="127.0.0.1",
        device_ids=[str(rank) for rank in range(engine.tensor_parallel_size)],
        epoch=secrets.randbits(62),
        credentials=Credentials(secrets.token_bytes(32)),
        num_threads=num_threads,
        kv_transport="shm",
        kv_port_range=PortRange(),
        engine=engine,
        timeouts=timeouts,
    )
