"""Reads the CPU time of processes and their descendants from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """Returns the process and all its descendants."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
                found += [int(child) for child in task.read_text().split()]
    return found


def cpu_s(*pids: int) -> float:
    """Returns the user and system time of these processes and their descendants, to 0.01 s.

    Raises OSError if one of `pids` has ended.
    """
    ticks = 0
    for each in {member for pid in pids for member in family(pid)}:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            if each in pids:
                raise
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S
