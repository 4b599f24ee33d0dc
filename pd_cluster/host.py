"""Reads what this process may use of the host: memory, cores and disk, within the limits of its control groups.

Supports control groups of both versions. Knows nothing of devices, models or settings. `root` is the root of the file
system, for tests.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
GIB = 1 << 30
NO_LIMIT = 1 << 60  # bytes; version 1 writes a number near 2**63 if there is no limit


class HostMemory(NamedTuple):
    """Memory for new allocations. `where`: the host or the control group to which `limit` applies.

    `available` includes page cache that the kernel can reclaim.
    """

    available: int
    limit: int
    where: str

    def __str__(self) -> str:
        return f"{self.available / GIB:.2f} GiB of the {self.limit / GIB:.2f} GiB of {self.where}"


class _Files(NamedTuple):
    """A controller's file names in one version. `total`: prefix of entries in memory.stat that include child groups."""

    limits: tuple[str, ...]
    usage: str
    total: str


FILES = {
    2: _Files(("memory.max", "memory.high"), "memory.current", ""),
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
}


def memory(root: Path = ROOT) -> HostMemory:
    """Returns the memory of the host or of a control group of this process, whichever has the least available."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text("ascii").splitlines())
    sizes = {name: int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal")}
    found = [HostMemory(sizes["MemAvailable"], sizes["MemTotal"], "this host")]
    for version, folder, name in _groups("memory", root):
        with contextlib.suppress(OSError, ValueError):  # the root of a hierarchy has no such files
            limit = min(_number(folder / each) for each in FILES[version].limits if (folder / each).exists())
            if limit < sizes["MemTotal"]:
                used = _number(folder / FILES[version].usage) - _reclaimable(folder, FILES[version].total)
                found.append(HostMemory(max(0, limit - max(0, used)), limit, f"the control group {name}"))
    return min(found)


def cores() -> frozenset[int]:
    """Returns the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def num_cores(root: Path = ROOT) -> int:
    """Counts the cores that this process may run on, or the cores that its control groups' quotas allow, if fewer."""
    return max(1, math.ceil(min(len(cores()), cores_quota(root))))


def cores_quota(root: Path = ROOT) -> float:
    """Returns the smallest quota of the control groups above this process, in cores; infinity if none has a quota."""
    return min((_quota(version, folder) for version, folder, _ in _groups("cpu", root)), default=math.inf)


def num_killed_for_memory(root: Path = ROOT) -> int:
    """Counts the processes that the kernel has killed for lack of memory, in this control group and those above it.

    If no control group is visible, counts those of the whole host.
    """
    files = {2: "memory.events", 1: "memory.oom_control"}
    found = [_counter(folder / files[version], "oom_kill") for version, folder, _ in _groups("memory", root)]
    seen = [count for count in found if count is not None]
    return sum(seen) if seen else _counter(root / "proc/vmstat", "oom_kill") or 0


def own_nbytes(root: Path = ROOT) -> int:
    """Returns the memory that this process does not share with others; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/self/smaps_rollup").read_text("ascii").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))
    return 0


def open_files() -> tuple[int, int]:
    """Returns this process's limit of open files, and the highest limit that it may set."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files(wanted: int) -> int:
    """Raises the limit of open files of this process and its later children, as far as allowed; returns the limit."""
    soft, hard = open_files()
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft if soft != resource.RLIM_INFINITY else wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def free_nbytes(folder: str | Path) -> int:
    """Returns the free bytes of a folder's file system. Raises OSError."""
    return shutil.disk_usage(folder).free


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path, str]]:
    """Yields (version, folder, name) of this process's control group and of each visible group above it."""
    with contextlib.suppress(OSError, ValueError):
        mounts = list(_mounts(root))
        for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            version = 1 if controllers else 2
            if version == 1 and controller not in controllers.split(","):
                continue
            for at, mounted, kind, options in mounts:
                if kind != ("cgroup2" if version == 2 else "cgroup"):
                    continue
                if version == 1 and controller not in options:
                    continue
                inside = os.path.relpath(path, mounted) if _is_under(path, mounted) else "."
                own = Path(os.path.normpath(at / inside))
                for folder in (own, *own.parents):
                    if folder.is_dir():
                        yield version, folder, f"/{folder.relative_to(at)}" if folder != at else mounted
                    if folder == at:
                        break


def _is_under(path: str, mounted: str) -> bool:
    return ".." not in path.split("/") and os.path.commonpath((path, mounted)) == mounted


def _mounts(root: Path) -> Iterator[tuple[Path, str, str, list[str]]]:
    """Yields (mount point, the mounted group, type, options) of each hierarchy; see proc_pid_mountinfo(5)."""
    for line in (root / "proc/self/mountinfo").read_text("utf-8").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            mounted, at = fields.split(" ")[3:5]
            yield root / at.lstrip("/"), mounted, kind, options.split(",")


def _number(file: Path) -> int:
    text = file.read_text("ascii").strip()
    return NO_LIMIT if text == "max" else int(text)


def _reclaimable(folder: Path, total: str) -> int:
    """Returns the page cache that the kernel can reclaim: files that are not mapped, or not used recently."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
    inactive, active, mapped = (
        int(stat.get(f"{total}{name}", 0))
        for name in ("inactive_file", "active_file", "file_mapped" if not total else "mapped_file")
    )
    return inactive + max(0, active - mapped)


def _quota(version: int, folder: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        if version == 2:
            quota, period = (folder / "cpu.max").read_text("ascii").split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
        if quota != "max" and int(quota) > 0:
            return int(quota) / int(period)
    return math.inf


def _counter(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text("ascii").splitlines():
            key, value = line.split()
            if key == name:
                return int(value)
    return None
