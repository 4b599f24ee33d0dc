"""A cluster's use of machine resources in `benchmarks faults`, counted before and after each run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks import process_use
from pd_cluster.bench.process_times import family
from pd_cluster.result_tables import Result, counted

SHARED = Path("/dev/shm")
MOST_DESCRIPTORS = 8  # allowed increase, for connections of clients and links that are about to close


class ResourceUse(NamedTuple):
    """The resources that this process's descendants use, and the processes in `also`, which are ranks whose preloader
    was killed.

    `num_shared`: files in /dev/shm, of any owner.
    """

    num_processes: int
    num_descriptors: int
    num_shared: int
    memory_mib: float  # resident, without shared pages, which a pool gets when blocks are first filled

    @classmethod
    def now(cls, also: Iterable[int] = ()) -> ResourceUse:
        pids = {*family(os.getpid()), *also} - {os.getpid()}
        num_open, num_pages = 0, 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                num_open += process_use.num_descriptors(pid)
                _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
                num_pages += resident - shared
        num_shared = sum(1 for _ in SHARED.iterdir()) if SHARED.is_dir() else 0
        return cls(len(pids), num_open, num_shared, num_pages * process_use.PAGE_NBYTES / (1 << 20))

    def since(self, before: ResourceUse) -> ResourceUse:
        return ResourceUse(
            self.num_processes - before.num_processes,
            self.num_descriptors - before.num_descriptors,
            self.num_shared - before.num_shared,
            self.memory_mib - before.memory_mib,
        )

    def results(self) -> list[Result]:
        return [
            counted("processes left", self.num_processes, "processes", 0),
            counted("descriptors left", self.num_descriptors, "descriptors", MOST_DESCRIPTORS),
            counted("shared memory left", self.num_shared, "files", 0),
            counted("memory left", self.memory_mib, "MiB"),
        ]


NOTHING = ResourceUse(0, 0, 0, 0.0)
