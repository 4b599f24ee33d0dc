"""A cluster's use of machine resources in `benchmarks faults`, counted before and after each run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import family

SHARED = Path("/dev/shm")
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


class Left(NamedTuple):
    """The use of this process's descendants and of `also`: ranks whose preloader was killed have no parent.

    `num_shared`: files in /dev/shm, of any owner.
    """

    num_processes: int
    num_descriptors: int
    num_shared: int
    memory_mib: float  # resident, without shared pages: a pool gets those as blocks are first filled

    @classmethod
    def now(cls, also: Iterable[int] = ()) -> Left:
        pids = {*family(os.getpid()), *also} - {os.getpid()}
        num_descriptors, num_pages = 0, 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                num_descriptors += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
                num_pages += resident - shared
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
