"""Stops OpenMP threads of a user's process from spinning while other programs need the cores. Never imports torch.

A thread that waits for its team spins for milliseconds before it sleeps. Spinning is fastest on free cores, but on busy
cores it uses the core that the awaited thread needs. Rank processes have OMP_WAIT_POLICY=passive. libgomp reads this
variable only when it is loaded, which is too late for a program that has already imported torch. However, libgomp
hardly spins while it has more threads than cores (GOMP_SPINCOUNT in its manual). Therefore sleeping threads are added
while threads of this process wait for cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pd_cluster.devices.core_affinity import Waited, waited_by
from pd_cluster.native.build import KernelsUnavailable, openmp_runtime

log = logging.getLogger(__name__)

PARKED = {"OMP_WAIT_POLICY": "passive"}  # variables of this package's own processes
OWN_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables that the user may have set
TASKS = Path("/proc/self/task")
WINDOW_S = 0.25  # the time over which waiting is measured
MOST_COST = 0.01  # maximum share of the time that measuring may take
# Limits for the share of a window in which the longest-waiting thread had no core: spinning is suppressed above the
# first, and allowed again below the second.
BEGINS, ENDS = 0.2, 0.1
QUIET_S = 10.0  # minimum time before spinning is allowed again


@dataclass(slots=True)
class Spinning:
    """At first and while other programs need the cores, makes waiting threads sleep without spinning.

    `close` ends this. `num_threads`: the number of threads of a step. The computing thread calls `tick` between steps.
    """

    runtime: ctypes.CDLL  # the OpenMP library whose threads torch uses
    num_threads: int
    waited: Waited = waited_by
    clock: Callable[[], float] = time.monotonic
    _sleepers: _Sleepers | None = field(default=None, init=False)
    _measured_s: float = field(default=0.0, init=False)
    _next_s: float = field(default=0.0, init=False)
    _quiet_until_s: float = field(default=0.0, init=False)
    _before_s: dict[int, float] = field(default_factory=dict, init=False)
    _is_off: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._sleepers = self._added()
        self._measure()

    @classmethod
    def here(cls, num_threads: int, env: Mapping[str, str] = os.environ) -> Spinning | None:
        """Returns None for one thread, for a user's own policy, and unless exactly one OpenMP library is loaded."""
        if num_threads < 2 or any(env.get(name) for name in OWN_POLICIES):
            return None
        try:
            return cls(openmp_runtime(), num_threads)
        except KernelsUnavailable as error:
            log.info("OpenMP's threads spin as they do by default: %s", error)
            return None

    @property
    def is_quiet(self) -> bool:
        return self._sleepers is not None

    def tick(self) -> None:
        """Measures at intervals whether threads wait for cores, and decides for the next window. Never raises."""
        now_s = self.clock()
        if self._is_off or now_s < self._next_s:
            return
        share = self._measure()
        if share > BEGINS:
            self._quiet_until_s = now_s + QUIET_S
        if share > BEGINS and not self.is_quiet:
            log.debug("OpenMP's waiting threads now sleep without spinning: other threads need the cores")
            self._sleepers = self._added()
        elif share < ENDS and self.is_quiet and now_s >= self._quiet_until_s:
            log.debug("OpenMP's threads spin before they sleep: the cores are free")
            self._remove()

    def close(self) -> None:
        self._is_off = True
        self._remove()

    def _measure(self) -> float:
        """Returns the largest share of the time since the last call for which a thread of this process had no core."""
        began_s, found = self.clock(), {}
        with contextlib.suppress(OSError, ValueError):  # if the kernel does not count waiting, spinning stays unchanged
            found = {int(each): self.waited(int(each)) for each in os.listdir(TASKS)}
        ended_s = self.clock()
        longest_s = max((found[each] - self._before_s[each] for each in found if each in self._before_s), default=0.0)
        share = longest_s / max(began_s - self._measured_s, 1e-9)
        self._before_s, self._measured_s = found, began_s
        self._next_s = began_s + max(WINDOW_S, (ended_s - began_s) / MOST_COST)
        return share

    def _added(self) -> _Sleepers | None:
        if "gomp" not in self.runtime._name:
            log.warning("waiting threads spin; if other programs are busy, start with OMP_WAIT_POLICY=passive")
            self._is_off = True
            return None
        num_cores: int = self.runtime.omp_get_num_procs()
        return _Sleepers(self.runtime, max(2, num_cores - self.num_threads + 2))

    def _remove(self) -> None:
        if self._sleepers is not None:
            self._sleepers.close()
            self._sleepers = None


class _Sleepers:
    """An idle OpenMP team of the given number of threads, one of which is a Python thread."""

    def __init__(self, runtime: ctypes.CDLL, size: int) -> None:
        self._runtime, self._size = runtime, size
        self._is_there, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="openmp sleepers", daemon=True)
        self._thread.start()
        self._is_there.wait()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        work = ctypes.cast(self._runtime.omp_get_thread_num, ctypes.c_void_p)  # any function that returns at once
        self._runtime.GOMP_parallel(work, None, ctypes.c_uint(self._size), ctypes.c_uint(0))
        self._is_there.set()
        self._ends.wait()
