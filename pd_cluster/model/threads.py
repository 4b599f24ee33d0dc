"""The compute threads of a rank's steps, where the ranks of a host share its cores. Knows nothing of files.

Numbers never depend on the number of threads, or on where they run: tests/model/test_threads.py verifies that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from pd_cluster.devices.cores import CoreLedger
from pd_cluster.devices.home import Home

log = logging.getLogger(__name__)


class StepThreads:
    """Without a ledger, every step has the threads that the process started with; without a home, on any core."""

    def __init__(self) -> None:
        self._ledger: CoreLedger | None = None
        self._home: Home | None = None

    @property
    def may_change(self) -> bool:
        return self._ledger is not None

    def share(self, ledger: CoreLedger) -> None:
        """Steps from now on use what `ledger`, which is open, gives them; the rest of their work has its own share."""
        self._ledger = ledger

    def settle(self, home: Home) -> None:
        """Steps from now on run in `home` while they use the rank's own share of cores."""
        self._home = home

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Computes a step; the caller's thread is the one that computes. `rest` follows when no other step does."""
        if self._ledger is not None:
            self._ledger.begin()
        if self._home is not None:
            self._home.begin()
        try:
            self.adjust()
            yield
        finally:
            if self._ledger is not None:
                torch.set_num_threads(self._ledger.own_threads)
            if self._home is not None:
                self._home.end()

    def adjust(self) -> None:
        """Takes cores that are free by now, and gives back those whose ranks compute again; called between layers."""
        num_threads = torch.get_num_threads()
        if self._ledger is not None and (allowed := self._ledger.num_threads()) != num_threads:
            torch.set_num_threads(num_threads := allowed)
            log.debug("a step continues with %d threads", num_threads)
        if self._home is not None:
            self._home.take(num_threads)

    def rest(self) -> None:
        """Lends this rank's cores until its next step."""
        if self._ledger is not None:
            self._ledger.end()
