"""A process's limits on its host: cgroups of both versions, at and below the root of their mounts."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from pd_cluster import host

MIB = 1 << 20
MEMINFO = f"MemTotal: {(16 << 30) >> 10} kB\nMemFree: 1 kB\nMemAvailable: {(8 << 30) >> 10} kB\n"
V2 = "30 20 0:25 {mounted} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = (
    "31 20 0:26 {mounted} /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory\n"
    "32 20 0:27 {mounted} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: str, used: int, *, inactive: int = 0, active: int = 0, mapped: int = 0) -> dict[str, str]:
    stat = f"anon 1\nfile_mapped {mapped}\ninactive_file {inactive}\nactive_file {active}\n"
    at = f"sys/fs/cgroup{folder}"
    return {f"{at}/memory.max": f"{limit}\n", f"{at}/memory.current": f"{used}\n", f"{at}/memory.stat": stat}


def v1(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{folder}"
    stat = f"inactive_file 0\ntotal_inactive_file {inactive}\ntotal_active_file 0\ntotal_mapped_file 0\n"
    files = {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{used}\n", "stat": stat}
    return {f"{at}/memory.{name}": text for name, text in files.items()}


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    """Page cache counts as free, except active mapped files, which may be a model's weights."""
    own = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2.format(mounted="/")}
    write(tmp_path, own | v2("", str(1000 * MIB), 990 * MIB, inactive=500 * MIB, active=300 * MIB, mapped=100 * MIB))
    found = host.memory(tmp_path)
    assert (found.available, found.limit) == (710 * MIB, 1000 * MIB)
    assert str(found) == "0.69 GiB of the 0.98 GiB of the control group /"


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """In version 2, below the mount's root, the smallest limit of all parent groups counts, `memory.high` included."""
    own = {"proc/self/cgroup": "0::/a/b/c\n", "proc/self/mountinfo": V2.format(mounted="/")}
    above = v2("/a", str(100 * MIB), 60 * MIB, inactive=20 * MIB)
    write(tmp_path, own | above | v2("/a/b", "max", 0) | v2("/a/b/c", str(90 * MIB), 10 * MIB))
    assert host.memory(tmp_path)[:2] == (60 * MIB, 100 * MIB)
    assert host.memory(tmp_path).where == "the control group /a"
    write(tmp_path, {"sys/fs/cgroup/a/b/memory.high": f"{5 * MIB}\n"})
    assert host.memory(tmp_path)[:2] == (5 * MIB, 5 * MIB)


@pytest.mark.parametrize("mounted", ["/", "/docker/x"])
def test_version_1_below_the_root_of_the_mount(tmp_path: Path, mounted: str) -> None:
    """Covers a host, and a container that shares the host's cgroup namespace."""
    path = "/docker/x/y" if mounted != "/" else "/y"
    own = {"proc/self/cgroup": f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n"}
    own |= {"proc/self/mountinfo": V1.format(mounted=mounted)}
    no_limit = (1 << 63) - 4096
    write(tmp_path, own | v1("", no_limit, 5 << 30) | v1("/y", 300 * MIB, 280 * MIB, inactive=100 * MIB))
    assert host.memory(tmp_path)[:2] == (120 * MIB, 300 * MIB)
    quota = {"sys/fs/cgroup/cpu/y/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/y/cpu.cfs_period_us": "100000\n"}
    write(tmp_path, quota)
    assert (host.cores_quota(tmp_path), host.num_cores(tmp_path)) == (0.5, 1)


def test_a_group_that_cannot_be_seen(tmp_path: Path) -> None:
    """For a group outside the namespace (path begins with /..), the mount's root is used."""
    own = {"proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": V2.format(mounted="/")}
    write(tmp_path, own | v2("", str(7 * MIB), MIB))
    assert host.memory(tmp_path)[:2] == (6 * MIB, 7 * MIB)
    nothing = write(tmp_path / "none", {})
    assert host.memory(nothing) == (8 << 30, 16 << 30, "this host")
    assert host.cores_quota(nothing) == math.inf
    assert host.num_cores(nothing) == len(os.sched_getaffinity(0))


def test_quotas_and_kills_of_version_2(tmp_path: Path) -> None:
    own = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2.format(mounted="/")}
    write(tmp_path, own | {"sys/fs/cgroup/a/cpu.max": "150000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"})
    assert host.cores_quota(tmp_path) == 1.5
    write(tmp_path, {"proc/vmstat": "nr_free 1\noom_kill 9\n"})
    assert host.num_killed_for_memory(tmp_path) == 9
    write(tmp_path, {"sys/fs/cgroup/a/b/memory.events": "low 0\noom 4\noom_kill 3\n"})
    assert host.num_killed_for_memory(tmp_path) == 3, "other groups must not count if the own group is visible"


def test_this_host() -> None:
    found = host.memory()
    assert 1 << 20 < found.available <= found.limit < 1 << 50
    assert host.num_cores() >= 1
    assert host.own_nbytes() > 1 << 20
