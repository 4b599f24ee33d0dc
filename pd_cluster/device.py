"""The one place that names devices to torch: which kind, how many, which one is mine.

CUDA and NPU arrive with their own issues of this interface; asking for them before that is refused here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from pd_cluster.errors import ConfigError

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


def num_threads_for(num_local_instances: int) -> int:
    """Compute threads of one instance when that many share this host's cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_local_instances))
