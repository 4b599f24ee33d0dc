"""Binds the threads of a rank's steps to its share of the host's cores. Never imports torch.

A bound thread cannot move away from a core that another program uses, so binding pauses when a thread has waited for a
core for long. docs/protocol/membership.md has the rules.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pd_cluster import host

log = logging.getLogger(__name__)

CPUS = Path("/sys/devices/system/cpu")
OWN_BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # users' own settings
WINDOW_S = 0.5  # the duration of steps over which waiting is measured
MOST_WAITING = 0.3  # maximum share of that time that a thread may wait
AWAY_S = 10.0
MEASURED_AT_ONCE = 4  # number of threads; with more, only some steps are measured
NS = 1e9

Waited = Callable[[int], float]  # thread id -> seconds that the thread has waited for a core since it began
Spread = Callable[[int, frozenset[int]], list[int]]  # binds the caller's team of that size; returns thread ids


def in_order(cores: Collection[int], folder: Path = CPUS) -> list[int]:
    """Sorts cores so that those that share a physical core, a package or a memory node are adjacent."""
    return sorted(cores, key=lambda core: (_node(core, folder), *_place(core, folder), core))


def _node(core: int, folder: Path) -> int:
    """Returns a core's memory node; 0 if the kernel names none."""
    return min((int(entry.name[4:]) for entry in (folder / f"cpu{core}").glob("node[0-9]*")), default=0)


def _place(core: int, folder: Path) -> tuple[int, int]:
    """Returns a core's package and physical core."""
    topology = folder / f"cpu{core}" / "topology"
    try:
        package, physical = ((topology / name).read_text("ascii") for name in ("physical_package_id", "core_id"))
    except OSError:
        return 0, core
    return int(package), int(physical)


def as_list(cores: Collection[int]) -> str:
    """Formats cores like the kernel, such as 0-3,8-11."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


class CannotBind(Exception):
    """The reason why a rank's threads cannot be bound."""


def always() -> bool:
    return True


@dataclass(slots=True)
class CoreAffinity:
    """The cores of one rank. The computing thread calls its methods, which never raise."""

    cores: frozenset[int]
    all_cores: frozenset[int]
    node_cores: frozenset[int]  # all cores of these cores' memory nodes
    waited: Waited
    spread: Spread | None = None  # None only for a rank with one core
    clock: Callable[[], float] = time.monotonic
    may_bind: Callable[[], bool] = always  # called at the beginning of a step
    _may_bind: bool = field(default=True, init=False)
    _is_home: bool = field(default=False, init=False)
    _is_off: bool = field(default=False, init=False)
    away_until_s: float = field(default=0.0, init=False)
    _team: tuple[int, frozenset[int]] = field(default=(1, frozenset()), init=False)
    _watch: _Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = _Watch(self.waited)

    @classmethod
    def of(cls, index: int, size: int, env: Mapping[str, str] = os.environ, folder: Path = CPUS) -> Self:
        """Returns the affinity of the rank with this index among the ranks of its host. Raises CannotBind."""
        own = next((name for name in OWN_BINDINGS if env.get(name, "").lower() not in ("", "false")), "")
        if own:
            raise CannotBind(f"{own} is set, which binds threads itself")
        allowed = host.cores()
        if (num_cores := len(allowed) // size) < 1:
            raise CannotBind(f"{size} ranks share {len(allowed)} cores")
        nodes = {core: _node(core, folder) for core in allowed}
        cores = in_order(allowed, folder)[index * num_cores : (index + 1) * num_cores]
        own_nodes = {nodes[core] for core in cores}
        node_cores = frozenset(core for core in allowed if nodes[core] in own_nodes)
        return cls(frozenset(cores), allowed, node_cores, waited_by)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Keeps the calling thread, and threads that it starts, on the memory nodes of these cores, to load a model."""
        self._bind(self.node_cores)
        try:
            yield
        finally:
            self._bind(self.all_cores)

    def begin(self) -> None:
        """Begins a step; must be called before `take`."""
        self._may_bind = not self._is_off and self.clock() >= self.away_until_s and self.may_bind()
        if self._may_bind:
            with self._turning_off():
                self._watch.begin(self.clock())

    def take(self, num_threads: int) -> None:
        """Binds a step's threads to the rank's cores; more threads than the rank has cores may use all cores."""
        is_home = self._may_bind and not self._is_off and num_threads <= len(self.cores)
        if is_home != self._is_home:
            self._bind(self.cores if is_home else self.all_cores)
            self._is_home = is_home and not self._is_off
        team = num_threads, self.cores if self._is_home else self.all_cores
        if num_threads > 1 and team != self._team and self.spread is not None:
            try:
                self._watch.threads = self.spread(*team)
            except OSError as error:
                self.spread = None
                self._turn_off(error)
        self._team = team

    def end(self) -> None:
        """Ends a step. Threads that start later are not bound, so the next step binds its team again."""
        self._team = 1, frozenset()
        if not self._is_home:
            return
        self._is_home = False
        self._bind(self.all_cores)
        with self._turning_off():
            if self._watch.end(self.clock()):
                self.away_until_s = self.clock() + AWAY_S
                log.debug("steps leave the cores %s for %g s: others compute there", as_list(self.cores), AWAY_S)

    def _bind(self, cores: frozenset[int]) -> None:
        if not self._is_off:
            with self._turning_off():
                os.sched_setaffinity(0, cores)

    @contextlib.contextmanager
    def _turning_off(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._is_off, self._is_home = True, False
        log.info("steps run on all cores from now on: threads cannot be bound to cores (%s)", error)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self.all_cores)


@dataclass(slots=True)
class _Watch:
    """Measures how long the threads of steps wait for a core, in only some steps if there are many threads."""

    waited: Waited
    threads: list[int] = field(default_factory=list)  # the last team's threads; empty: only the calling thread
    _began_s: float = 0.0
    _before: dict[int, float] = field(default_factory=dict)
    _num_left: int = 0  # steps until the next measured one
    _steps_s: float = 0.0
    _waited_s: dict[int, float] = field(default_factory=dict)

    def begin(self, now_s: float) -> None:
        """Raises OSError or ValueError if the kernel does not report waiting."""
        self._before = {}
        self._num_left -= 1
        if self._num_left < 0:
            threads = self.threads or [threading.get_native_id()]
            self._num_left = len(threads) // MEASURED_AT_ONCE
            self._before = {each: self.waited(each) for each in threads}
            self._began_s = now_s

    def end(self, now_s: float) -> bool:
        """Returns whether a thread waited too long; False until enough steps are measured. Raises like `begin`."""
        if not self._before:
            return False
        self._steps_s += now_s - self._began_s
        for each, before_s in self._before.items():
            self._waited_s[each] = self._waited_s.get(each, 0.0) + max(0.0, self.waited(each) - before_s)
        self._before = {}
        if self._steps_s < WINDOW_S:
            return False
        waits = max(self._waited_s.values()) > MOST_WAITING * self._steps_s
        self._steps_s, self._waited_s = 0.0, {}
        return waits


def waited_by(thread: int) -> float:
    """Returns the seconds that a thread has waited; 0 if it has ended. Raises OSError or ValueError without counts."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            ran, waited, *_ = map(int, file.read().split())
    except FileNotFoundError:
        if Path("/proc/thread-self/schedstat").exists():
            return 0.0
        raise
    if not ran and not waited:
        raise ValueError("the kernel does not count how long threads wait")
    return waited / NS
