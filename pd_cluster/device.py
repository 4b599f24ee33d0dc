"""The one place that names devices to torch: which kind, how many, which one is mine.

CUDA and NPU arrive with their own issues of this interface; asking for them before that is refused here.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pd_cluster.errors import ConfigError

# (limit, use) of this process's control group as containers see it, versions 2 and 1
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

DeviceKind = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that one rank process computes on. `index` counts what this process sees."""

    kind: DeviceKind
    index: int = 0

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def dist_backend(self) -> str:
        return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[self.kind]


def resolve(name: str) -> Device:
    """`--device` to a Device. Raises ConfigError for kinds that this version cannot serve on."""
    if name in ("auto", "cpu"):
        return Device("cpu")
    raise ConfigError(f"--device {name}: this version serves on CPU only; use --device cpu")


def available_nbytes(device: Device) -> int:
    """Memory that new allocations on the device can have; on CPU the host's, within this process's control group."""
    if device.kind != "cpu":
        raise ConfigError(f"memory of {device.torch_name} cannot be read in this version")
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    for limit, used in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            available = min(available, int(Path(limit).read_text("ascii")) - int(Path(used).read_text("ascii")))
    return max(0, available)


def num_threads_for(num_local_ranks: int) -> int:
    """Compute threads of one rank process when that many share this host's cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_local_ranks))
