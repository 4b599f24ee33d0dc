"""Keeps the threads of a rank's steps on its own share of the host's cores. Never imports torch.

A bound thread cannot leave a core that another program takes, so a home is left for a while when its thread has waited
for long. docs/protocol.md has the states and events.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

CPUS = Path("/sys/devices/system/cpu")
OWN_BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # of the user
WINDOW_S = 0.5  # of steps, over which waiting is measured
MOST_WAITING = 0.3  # of that time
AWAY_S = 10.0
NS = 1e9

Waited = Callable[[], float]  # seconds that the calling thread has waited for a core since it began
Spread = Callable[[int, frozenset[int]], None]  # binds all threads of the calling thread's team of that many


def in_order(cores: Collection[int], folder: Path = CPUS) -> list[int]:
    """Returns cores so that those that share a physical core, a package or a memory node are neighbours."""
    return sorted(cores, key=lambda core: (_node(core, folder), *_place(core, folder), core))


def _node(core: int, folder: Path) -> int:
    """Returns the memory node of a core; 0 where the kernel names none."""
    return min((int(entry.name[4:]) for entry in (folder / f"cpu{core}").glob("node[0-9]*")), default=0)


def _place(core: int, folder: Path) -> tuple[int, int]:
    """Returns a core's package, and the physical core in it."""
    topology = folder / f"cpu{core}" / "topology"
    try:
        package, physical = ((topology / name).read_text("ascii") for name in ("physical_package_id", "core_id"))
    except OSError:
        return 0, core
    return int(package), int(physical)


def as_list(cores: Collection[int]) -> str:
    """Returns cores as the kernel writes them: 0-3,8-11."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


class CannotBind(Exception):
    """The reason why a rank has no home."""


@dataclass(slots=True)
class Home:
    """The home of one rank. Its methods are called by the thread that computes, and never raise."""

    cores: frozenset[int]
    all_cores: frozenset[int]
    node_cores: frozenset[int]  # those of the home's memory nodes
    waited: Waited
    spread: Spread | None = None  # for a rank of several cores
    clock: Callable[[], float] = time.monotonic
    _is_home: bool = field(default=False, init=False)
    _is_off: bool = field(default=False, init=False)
    _away_until_s: float = field(default=0.0, init=False)
    _began: tuple[float, float] = field(default=(0.0, 0.0), init=False)  # by the clock, and what was waited until then
    _steps_s: float = field(default=0.0, init=False)
    _waited_s: float = field(default=0.0, init=False)
    _team: tuple[int, frozenset[int]] = field(default=(1, frozenset()), init=False)

    @classmethod
    def of(cls, index: int, size: int, env: Mapping[str, str] = os.environ, folder: Path = CPUS) -> Self:
        """Returns the home of a rank by its place among the ranks of its host. Raises CannotBind."""
        own = next((name for name in OWN_BINDINGS if env.get(name)), "")
        if own:
            raise CannotBind(f"{own} is set, which binds threads itself")
        allowed = frozenset(os.sched_getaffinity(0))
        if (num_cores := len(allowed) // size) < 1:
            raise CannotBind(f"{size} ranks share {len(allowed)} cores")
        cores = in_order(allowed, folder)[index * num_cores : (index + 1) * num_cores]
        nodes = {_node(core, folder) for core in cores}
        node_cores = frozenset(core for core in allowed if _node(core, folder) in nodes)
        return cls(frozenset(cores), allowed, node_cores, waited_by_this_thread)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Loads a model with the calling thread, and those that it starts, on the home's memory nodes."""
        self._bind(self.node_cores)
        try:
            yield
        finally:
            self._bind(self.all_cores)

    def begin(self) -> None:
        """Begins a step; `take` follows."""
        if self._is_off:
            return
        with self._turning_off():
            self._began = self.clock(), self.waited()

    def take(self, num_threads: int) -> None:
        """Gives a step's threads the home if they are the rank's own share, and all cores if there are more."""
        is_home = not self._is_off and num_threads <= len(self.cores) and self.clock() >= self._away_until_s
        if is_home != self._is_home:
            self._bind(self.cores if is_home else self.all_cores)
            self._is_home = is_home and not self._is_off
        team = num_threads, self.cores if self._is_home else self.all_cores
        if num_threads > 1 and team != self._team and self.spread is not None:
            with self._turning_off():
                self.spread(*team)
        self._team = team

    def end(self) -> None:
        """Ends a step."""
        if not self._is_home:
            return
        self._is_home = False
        self._bind(self.all_cores)
        with self._turning_off():
            self._steps_s += self.clock() - self._began[0]
            self._waited_s += self.waited() - self._began[1]
        if self._steps_s < WINDOW_S:
            return
        if self._waited_s > MOST_WAITING * self._steps_s:
            self._away_until_s = self.clock() + AWAY_S
            log.debug("steps leave the cores %s for %g s: others compute there", as_list(self.cores), AWAY_S)
        self._steps_s = self._waited_s = 0.0

    def _bind(self, cores: frozenset[int]) -> None:
        if not self._is_off:
            with self._turning_off():
                os.sched_setaffinity(0, cores)

    @contextlib.contextmanager
    def _turning_off(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._is_off = True
            log.info("steps run on all cores from now on: threads cannot be bound to cores (%s)", error)


def waited_by_this_thread() -> float:
    """Raises OSError or ValueError where the kernel does not say it."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / NS
