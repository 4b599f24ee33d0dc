"""Shares the cores of a host among its ranks: each rank has its own cores and lends them while it is idle."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.weight_files import weights_nbytes
from pd_cluster.devices.core_affinity import CannotBind, CoreAffinity, as_list
from pd_cluster.devices.core_ledger import CoreLedger
from pd_cluster.devices.device import Device
from pd_cluster.model.runner.step_threads import StepThreads
from pd_cluster.native.build import KernelsUnavailable
from pd_cluster.native.thread_binding import team_binding
from pd_cluster.settings.process_configs import SharedCores, WorkerConfig
from pd_cluster.settings.process_settings import CoreSharing

log = logging.getLogger(__name__)

LEAST_NBYTES = 64_000_000  # with fewer bytes of weights, most of a step is bookkeeping, which more threads slow down


class HostCores:
    """One rank's part in the core ledger, and its core affinity, if they are configured."""

    def __init__(self, config: WorkerConfig, device: Device) -> None:
        self._shared = None if device.is_accelerator else config.cores
        self._index = 0 if self._shared is None else self._shared.first + config.ranks.rank
        self._is_alone = config.ranks.size == 1 and config.unit is None
        self._is_small = True
        if self._shared is not None:
            self._is_small = weights_nbytes(Checkpoint.of(config.engine).path) < LEAST_NBYTES
        self._home: CoreAffinity | None = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context for loading the model into the memory nodes of the rank's own cores, if it has any."""
        if self._shared is not None and self._wants(self._shared.binding):
            self._home = _home(self._shared, self._index)
        with contextlib.nullcontext() if self._home is None else self._home.loading():
            yield

    def share(self, threads: StepThreads) -> None:
        """Lets steps use the cores of idle ranks, and binds steps to the rank's own cores while no others are lent to
        it.

        Unless a flag requires it, steps are bound only while all other ranks are visible in the ledger: in containers
        with separate cores, a rank may run on cores outside its share. The ranks of an instance or unit wait for each
        other, so a single rank cannot measure whether borrowing pays.
        """
        ledger = None
        if self._shared is not None and self._shared.ledger and self._wants(self._shared.lending):
            ledger = _ledger(self._shared, self._index)
            if ledger is not None:
                threads.share(ledger, judges=self._is_alone)
        if self._home is None or self._shared is None:
            return
        if self._shared.binding == "auto":
            if ledger is None:
                return
            self._home.may_bind = ledger.sees_all
        threads.settle(self._home)

    def _wants(self, sharing: CoreSharing) -> bool:
        return sharing == "on" or (sharing == "auto" and not self._is_small)


def _ledger(shared: SharedCores, index: int) -> CoreLedger | None:
    ledger = CoreLedger(Path(shared.ledger), index, shared.num_ranks, shared.num_cores)
    try:
        ledger.open()
    except OSError as error:
        log.info("this rank uses only its own cores: the ledger %s cannot be used: %s", shared.ledger, error.strerror)
        return None
    log.info("%d ranks of this host lend each other its %d cores", shared.num_ranks, shared.num_cores)
    return ledger


def _home(shared: SharedCores, index: int) -> CoreAffinity | None:
    try:
        home = CoreAffinity.of(index, shared.num_ranks)
        if len(home.cores) > 1:
            home.spread = team_binding()
    except (CannotBind, KernelsUnavailable, OSError, ValueError) as error:
        log.info("steps of this rank may run on any core: %s", error)
        return None
    log.info("this rank's own cores are %s, for steps without lent cores", as_list(home.cores))
    return home
