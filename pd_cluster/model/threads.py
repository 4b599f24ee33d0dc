"""The compute threads of a rank's steps, where the ranks of a host lend each other cores. Knows nothing of files.

Numbers never depend on the number of threads: tests/model/test_threads.py verifies that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from pd_cluster.devices.cores import CoreLedger

log = logging.getLogger(__name__)


class StepThreads:
    """Without a ledger, every step has the threads that the process started with."""

    def __init__(self) -> None:
        self._ledger: CoreLedger | None = None

    @property
    def may_change(self) -> bool:
        return self._ledger is not None

    def share(self, ledger: CoreLedger) -> None:
        """Steps from now on use what `ledger`, which is open, gives them; the rest of their work has its own share."""
        self._ledger = ledger

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Computes a step; the caller's thread is the one that computes. `rest` follows when no other step does."""
        if self._ledger is None:
            yield
            return
        self._ledger.begin()
        self.adjust()
        try:
            yield
        finally:
            torch.set_num_threads(self._ledger.own_threads)

    def adjust(self) -> None:
        """Takes cores that are free by now, and gives back those whose ranks compute again; called between layers."""
        if self._ledger is not None and (num_threads := self._ledger.num_threads()) != torch.get_num_threads():
            torch.set_num_threads(num_threads)
            log.debug("a step continues with %d threads", num_threads)

    def rest(self) -> None:
        """Lends this rank's cores until its next step."""
        if self._ledger is not None:
            self._ledger.end()
