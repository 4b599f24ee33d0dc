"""What a cluster of `bench faults` has of the machine: counted before and after each run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from pd_cluster.bench.router_processes import family

SHARED = Path("/dev/shm")
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


class Left(NamedTuple):
    """Of the processes that this one started, and theirs. `num_shared`: files in /dev/shm, whoever's they are."""

    num_processes: int
    num_descriptors: int
    num_shared: int
    memory_mib: float  # resident, shared pages counted in each process

    @classmethod
    def now(cls) -> Left:
        pids = [pid for pid in family(os.getpid()) if pid != os.getpid()]
        num_descriptors, num_pages = 0, 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                num_descriptors += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                num_pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        num_shared = sum(1 for _ in SHARED.iterdir()) if SHARED.is_dir() else 0
        return cls(len(pids), num_descriptors, num_shared, num_pages * PAGE_NBYTES / (1 << 20))

    def since(self, before: Left) -> Left:
        return Left(
            self.num_processes - before.num_processes,
            self.num_descriptors - before.num_descriptors,
            self.num_shared - before.num_shared,
            self.memory_mib - before.memory_mib,
        )


NOTHING = Left(0, 0, 0, 0.0)
