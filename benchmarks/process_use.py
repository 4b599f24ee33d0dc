"""Reads from /proc how long processes waited for cores, and their memory and files. Knows nothing of their work."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from pd_cluster.bench.process_times import family
from pd_cluster.errors import ConfigError

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def waited_s(pid: int) -> float:
    """Returns how long threads of the process and its children were ready to run but had no core."""
    waited_ns = 0
    for each in family(pid):
        for task in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
                waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


def num_descriptors(pid: int) -> int:
    """Returns the number of open descriptors. Raises OSError."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def mapped_kib(pid: int, what: str) -> int:
    """Returns the value of a line of smaps_rollup, such as "Pss" or "Anonymous". Raises OSError."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def rss_nbytes(pid: int) -> int:
    return sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in family(pid)) * PAGE_NBYTES


def raise_open_files(wanted: int = 0) -> None:
    """Raises the soft limit of open files to the hard limit. Raises ConfigError if that is below `wanted`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(f"the hard limit of open files is {hard}; {wanted} are needed: ulimit -Hn {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
