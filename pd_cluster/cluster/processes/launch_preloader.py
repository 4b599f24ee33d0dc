"""Runs the preloader that a launch's workers share. Starts no worker itself, and never imports torch."""

from __future__ import annotations

import os

from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.rank_process import environment
from pd_cluster.devices.device import num_threads_for
from pd_cluster.engine.start.preloader import VARIABLE, Preloader

DIE_WITH_PARENT = "PD_CLUSTER_DIE_WITH_PARENT"  # the parent's pid: `serve` ends when that process ends


class LaunchPreloader:
    """The preloader of one launch's workers, if its flags allow one.

    If it crashes, the start of the next worker restarts it; a worker without a preloader starts its ranks itself.
    """

    def __init__(self, launch: Launch, given: Preloader | None = None) -> None:
        """The caller keeps ownership of `given`."""
        self._launch = launch
        self._given = given if launch.forks else None
        self._own: Preloader | None = None
        self._start()

    def for_worker(self) -> tuple[dict[str, str], tuple[int, ...]]:
        """Returns the environment variables and file descriptors through which a worker reaches the preloader."""
        self._start()
        preloader = self._given or self._own
        if preloader is None:
            return {}, ()
        return {VARIABLE: str(preloader.fileno())}, (preloader.fileno(),)

    @property
    def pid(self) -> int:
        """The preloader's pid; 0 if it does not belong to this process."""
        return self._own.pid if self._own is not None else 0

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def _start(self) -> None:
        if self._given is not None or not self._launch.forks:
            return
        if self._own is not None:
            if self._own.is_alive:
                return
            self._own.close()
        num_threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or num_threads_for(self._launch.num_ranks)
        env = {**environment(num_threads, os.environ), DIE_WITH_PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._own = Preloader.start(env, self._launch.model_folder)
