"""A worker's weights: the version that its scheduler has requested, and the version with which the worker computes.

docs/protocol/weights.md has the state × event table. Knows nothing of tensors or of the requests' contents.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pd_cluster.errors import PdClusterError
from pd_cluster.wire import WeightStatus, WeightVersion

log = logging.getLogger(__name__)

RETRY_S = 5.0  # between attempts to find a version's files


@dataclass(frozen=True, slots=True)
class WeightSource:
    """`check`: raises PdClusterError if a version's files do not fit; it may take long. `is_found`: whether the files
    are those that were checked last. `load`: loads a version with such files on every rank.
    """

    check: Callable[[WeightVersion], None]
    is_found: Callable[[WeightVersion], bool]
    load: Callable[[WeightVersion], None]


class EngineWeights:
    """`source` None: the weights never change."""

    def __init__(self, source: WeightSource | None) -> None:
        self._source = source
        self._requested = WeightVersion()
        self._checking = WeightVersion()
        self._check_turn = threading.Lock()
        self._search: threading.Thread | None = None  # for the requested version's files
        self._retry_s = 0.0  # when to look for them again
        self._reporting = threading.Lock()
        self.status = WeightStatus()

    @property
    def epoch(self) -> int:
        return self.status.held.epoch

    def check(self, version: WeightVersion) -> None:
        """Checks a version's files on a separate thread while the engine continues."""
        self._checking = version
        threading.Thread(target=self._check, args=(version,), name="weights", daemon=True).start()

    def _check(self, version: WeightVersion) -> None:
        with self._check_turn:
            if version is not self._checking:  # a later check has replaced this one, which would read every byte
                return
            if self._source is None:
                problem = "this kind of instance keeps its weights; restart it with the new ones instead"
            else:
                problem = _problem(self._source.check, version)
            if version is self._checking:
                self._report(checked=version, problem=problem)

    def _report(self, **changes: Any) -> None:
        """Changes the status, on any thread."""
        with self._reporting:
            self.status = replace(self.status, **changes)

    def wish(self, version: WeightVersion) -> None:
        """Requests a version. Ignores it if it is older than the last requested version."""
        if _key(version) == _key(self.status.held):  # perhaps renamed, or in place of a version that is not loaded yet
            self._requested = version
            self._report(held=version, lacks="")
        elif self._source is None:
            log.warning("a scheduler requests weights %s, but this instance cannot change its weights", version.name)
        elif version.epoch >= self._requested.epoch:
            self._requested, self._retry_s = version, 0.0

    @property
    def is_due(self) -> bool:
        """Whether the requested version is not loaded yet. During the change no request may be in progress."""
        return _key(self._requested) != _key(self.status.held)

    @property
    def closed(self) -> str:
        """Returns why no request is taken; "" if requests are taken."""
        return "this instance takes no requests until it has loaded its new weights" if self.is_due else ""

    def refusal(self, epoch: int) -> str:
        """Returns why a leg that needs this version is refused; "" if it is accepted."""
        if epoch == self.epoch:
            return ""
        return f"this instance has version {self.epoch} of the weights, and the request needs version {epoch}"

    def settle(self) -> None:
        """Loads the requested version. If its files are missing, looks for them on a thread and tries again.

        If its files cannot be used, records the reason and tries again later. Raises ModelError if a rank cannot load
        the version.
        """
        assert self._source is not None
        started_s, version = time.monotonic(), self._requested
        if self._search is not None and self._search.is_alive():
            return
        if not self._source.is_found(version):
            if started_s >= self._retry_s:
                self._search = threading.Thread(target=self._look, args=(version,), name="weights", daemon=True)
                self._search.start()
            return
        self._source.load(version)
        self._report(held=version, lacks="")
        log.info("loaded weights %s (version %d) in %.2f s", version.name, version.epoch, time.monotonic() - started_s)

    def _look(self, version: WeightVersion) -> None:
        """Looks for a version's files, on this host and at other processes. The status says why none were found."""
        assert self._source is not None
        problem = _problem(self._source.check, version)
        if _key(version) != _key(self._requested):  # another version has been requested meanwhile
            return
        if problem:
            log.warning("weights %s (version %d) cannot be loaded: %s", version.name, version.epoch, problem)
            self._retry_s = time.monotonic() + RETRY_S
        self._report(lacks=problem)


def _key(version: WeightVersion) -> tuple[int, str]:
    """Two schedulers, one after the other, may give different weights the same epoch."""
    return version.epoch, version.digest


def _problem(check: Callable[[WeightVersion], None], version: WeightVersion) -> str:
    try:
        check(version)
    except PdClusterError as error:
        return error.text
    except OSError as error:
        return f"{version.path}: cannot be read: {error.strerror}"
    return ""
