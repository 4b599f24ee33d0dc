"""Makes folders with other weights for a tiny model, like a trainer's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.replaced_weights import check_replacement
from pd_cluster.wire import WeightVersion
from tests.support.cluster import LiveCluster


def make_version(base: Path, folder: Path, seed: int) -> Path:
    """Copies a model folder with each weight matrix's entries permuted, which keeps sizes and changes answers."""
    shutil.copytree(base, folder)
    generator = torch.Generator().manual_seed(seed)
    for file in folder.glob("*.safetensors"):
        save_file({name: _shuffled(each, generator) for name, each in load_file(file).items()}, file, {"format": "pt"})
    return folder


def two_versions(base: Path, root: Path) -> Path:
    for seed in (1, 2):
        make_version(base, root / f"step-{seed}", seed)
    return root


def restarted(cluster: LiveCluster, *names: str) -> None:
    """Kills and restarts instances."""
    for name in names:
        cluster.kill(name)
        cluster.await_exit(name)
    cluster.wait_until("the loss is noticed", lambda: not {*names} & {*info_of(cluster)["instances"]})
    for name in names:
        cluster.start_member(name)


def info_of(cluster: LiveCluster) -> dict[str, Any]:
    info: dict[str, Any] = cluster.ask_admin("GET", "/weight_info").json()
    return info


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape).contiguous()


class Trainer:
    """A trainer's rank 0 in a separate process, which broadcasts a folder's tensors in the order of their names."""

    SOURCE = """
import sys
from datetime import timedelta
import torch.distributed as dist
from safetensors.torch import load_file
port, *files = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2,
                        timeout=timedelta(seconds=60))
for file in files:
    for _, tensor in sorted(load_file(file).items()):
        dist.broadcast(tensor, src=0)
"""

    def __init__(self, port: int, folder: Path) -> None:
        files = sorted(map(str, folder.glob("*.safetensors")))
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-c", self.SOURCE, str(port), *files], env=env)
        self.info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        tensors = {name: each for file in files for name, each in sorted(load_file(file).items())}
        self.lists = {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }

    def part(self, start: int, stop: int | None = None) -> dict[str, Any]:
        return {"update_info": {name: values[start:stop] for name, values in self.lists.items()}}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def version_of(base: Path, folder: Path, epoch: int = 1) -> WeightVersion:
    return WeightVersion(epoch, folder.name, check_replacement(base, folder), str(folder))
