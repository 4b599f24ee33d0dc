"""Sets the compute threads of a rank's steps while the ranks of a host share its cores. Knows nothing of files.

Results never depend on the number of threads, nor on which cores run them; tests/model/test_step_threads.py verifies
this.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

from pd_cluster.devices.core_affinity import CoreAffinity
from pd_cluster.devices.core_ledger import CoreLedger
from pd_cluster.devices.openmp_spinning import Spinning
from pd_cluster.model.runner.core_lending import CoreLending

log = logging.getLogger(__name__)


class StepThreads:
    """Sets threads and cores. Without a ledger, every step uses the number of threads set at process start.

    Without an affinity, a step may run on any core.
    """

    def __init__(self) -> None:
        self._ledger: CoreLedger | None = None
        self._home: CoreAffinity | None = None
        self._core_lending: CoreLending | None = None
        self._spinning: Spinning | None = None

    @property
    def may_change(self) -> bool:
        return self._ledger is not None

    def share(self, ledger: CoreLedger, judges: bool = True) -> None:
        """Makes later steps use the cores that the open `ledger` assigns; other work keeps to the rank's own cores.

        `judges`: steps with few tokens use lent cores only if measurements show that these make them faster.
        """
        self._ledger = ledger
        self._core_lending = CoreLending() if judges else None

    def settle(self, home: CoreAffinity) -> None:
        """Pins later steps to these cores when they use only the rank's own cores."""
        self._home = home

    def watch(self, spinning: Spinning) -> None:
        """Notifies `spinning` at the end of each later step."""
        self._spinning = spinning

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager for loading weights again, in memory near the rank's own cores."""
        return contextlib.nullcontext() if self._home is None else self._home.loading()

    @contextlib.contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Wraps a step computed by the calling thread. Call `rest` if no other step follows."""
        if self._ledger is not None:
            self._ledger.begin()
            if self._core_lending is not None:
                self._core_lending.begin(num_tokens, time.monotonic())
        if self._home is not None:
            self._home.begin()
        try:
            self.adjust()
            yield
        finally:
            if self._ledger is not None:
                if self._core_lending is not None:
                    self._core_lending.end(time.monotonic())
                torch.set_num_threads(self._ledger.own_threads)
            if self._home is not None:
                self._home.end()
            if self._spinning is not None:
                self._spinning.tick()

    def adjust(self) -> None:
        """Takes free cores if they make steps faster, and returns lent cores to ranks that compute again.

        Call it between layers.
        """
        num_threads = torch.get_num_threads()
        if self._ledger is not None:
            allowed, own = self._ledger.num_threads(), self._ledger.own_threads
            if self._core_lending is not None and not self._core_lending.takes(allowed > own):
                allowed = min(allowed, own)
            if allowed != num_threads:
                torch.set_num_threads(num_threads := allowed)
                log.debug("step continues with %d threads", num_threads)
        if self._home is not None:
            self._home.take(num_threads)

    def rest(self) -> None:
        """Lends this rank's cores to others until its next step."""
        if self._ledger is not None:
            self._ledger.end()
