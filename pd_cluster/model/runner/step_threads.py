"""The compute threads of a rank's steps, where the ranks of a host share its cores. Knows nothing of files.

Numbers never depend on the number of threads, or on where they run: tests/model/test_step_threads.py verifies that.
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
    """Without a ledger, every step has the threads that the process started with; without a home, on any core."""

    def __init__(self) -> None:
        self._ledger: CoreLedger | None = None
        self._home: CoreAffinity | None = None
        self._core_lending: CoreLending | None = None
        self._spinning: Spinning | None = None

    @property
    def may_change(self) -> bool:
        return self._ledger is not None

    def share(self, ledger: CoreLedger, judges: bool = True) -> None:
        """Steps from now on use what `ledger`, which is open, gives them; the rest of their work has its own share.

        `judges`: steps of few tokens decline it where it has not made them faster.
        """
        self._ledger = ledger
        self._core_lending = CoreLending() if judges else None

    def settle(self, home: CoreAffinity) -> None:
        """Steps from now on run in `home` while they use the rank's own share of cores."""
        self._home = home

    def watch(self, spinning: Spinning) -> None:
        """Steps from now on tell `spinning` when they have ended."""
        self._spinning = spinning

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Loads weights again, near the home."""
        return contextlib.nullcontext() if self._home is None else self._home.loading()

    @contextlib.contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Computes a step; the caller's thread is the one that computes. `rest` follows when no other step does."""
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
        """Takes cores that are free and pay, and gives back those whose ranks compute again; called between layers."""
        num_threads = torch.get_num_threads()
        if self._ledger is not None:
            allowed, own = self._ledger.num_threads(), self._ledger.own_threads
            if self._core_lending is not None and not self._core_lending.takes(allowed > own):
                allowed = min(allowed, own)
            if allowed != num_threads:
                torch.set_num_threads(num_threads := allowed)
                log.debug("a step continues with %d threads", num_threads)
        if self._home is not None:
            self._home.take(num_threads)

    def rest(self) -> None:
        """Lends this rank's cores until its next step."""
        if self._ledger is not None:
            self._ledger.end()
